"""Figures of a command's start, made of its lines and events."""

from __future__ import annotations

import pytest
from benchmarks.start import ROWS, rows, times_of

LINES = [
    (13.0, "run: /runs/a\n"),
    (20.0, "done: 2 rounds\n"),
    (10.5, "[0.5s] loading libraries\n"),
    (22.5, "run: /runs/a\n"),
]
EVENTS = [
    {"kind": "join", "monotonic_s": 17.0},
    {"kind": "attempt", "monotonic_s": 12.0},
    {"kind": "join", "monotonic_s": 16.0},
]


def test_start_is_timed_to_the_first_line_and_worker_and_the_end_from_done_to_the_last_line() -> None:
    assert times_of(10.0, LINES, EVENTS) == pytest.approx((0.5, 6.0, 2.5))


def test_rows_are_seconds_alone_and_ratios_beside_another_checkout() -> None:
    alone, ratios = rows([0.5, 6.0, 2.0], None), rows([0.5, 6.0, 2.0], [1.0, 12.0, 2.0])
    assert [alone[name]["value"] for name in ROWS] == [0.5, 6.0, 2.0]
    assert [ratios[name]["value"] for name in ROWS] == [0.5, 0.5, 1.0]
    assert ratios["start_first_worker"]["beside_s"] == 12.0
