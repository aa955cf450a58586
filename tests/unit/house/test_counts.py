"""Counts in messages: a number and its noun agree."""

import pytest

from hypha_ray.telemetry.sinks.table import si
from hypha_ray.texts import counted


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 samples"), (1, "1 sample"), (2, "2 samples"), (si(1), "1 sample"), (si(1000), "1.00k samples")],
)
def test_count_agrees_with_its_noun(number: int | str, text: str) -> None:
    assert counted(number, "sample") == text
