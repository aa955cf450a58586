"""Every order of events of a tiny run, see exhaustive.py."""

from __future__ import annotations

import pytest

from tests.support.exhaustive import search


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["elastic", "replay"])
@pytest.mark.long(keep=1)
def test_every_order_of_events_of_a_tiny_run_ends_well(mode: str) -> None:
    found = search(mode)
    print(f"{mode}: {found.states} states, {found.depth} steps deep, {found.ends} ends, no violation")
    assert found.states > 3000 and found.depth > 30 and found.ends > 100
