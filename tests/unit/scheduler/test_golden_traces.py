"""The core gives the commands that it has always given, at the times at which it has; see golden.py."""

from __future__ import annotations

import json

import pytest

from tests.support.golden import FILE, runs

GOLDEN: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))


def test_every_golden_run_is_there() -> None:
    assert list(runs()) == list(GOLDEN)


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_commands_and_their_times_are_unchanged(name: str) -> None:
    assert runs()[name]() == GOLDEN[name]
