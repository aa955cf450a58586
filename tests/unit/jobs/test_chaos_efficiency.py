"""What jobs/chaos.py counts as work, between which moments."""

from __future__ import annotations

import os
from math import sqrt

import pytest
from chaoslab.figures.efficiency import (
    Edge,
    Window,
    calm_window,
    chaos_window,
    efficiency,
    last_calm_round,
    rounds_of,
    window,
)
from chaoslab.figures.growth import settled, slope_per_hour
from chaoslab.samples import Samples


def edges(times: list[float], samples: int = 80) -> list[Edge]:
    return [Edge(number, at, samples) for number, at in enumerate(times)]


def test_window_holds_whole_rounds_and_their_whole_time() -> None:
    found = window([Edge(0, 10, 999), Edge(1, 12, 80), Edge(2, 16, 40)], 1, 2)
    assert found is not None
    assert (found.begin_s, found.end_s, found.rounds, found.samples) == (10, 16, 2, 120)
    assert found.round_s == 3
    assert found.steps_per_s(8) == 120 / 8 / 6
    assert found.deviation == pytest.approx(sqrt(2) / 3)


def test_window_without_its_first_edge_or_a_whole_round_is_none() -> None:
    assert window(edges([1, 2, 3])[1:], 1, 2) is None
    assert window(edges([1, 2, 3]), 3, 5) is None
    assert window(edges([1, 2, 3]), 2, 5) == Window(2, 3, 1, 80, 0.0)


def test_calm_and_chaos_leave_out_the_start_and_the_first_round_of_kills() -> None:
    # Rounds 0 and 1 warm up, 2 … 4 are calm, 5 runs in, 6 and 7 are under kills; 8 comes after them.
    times = [50, 60, 70, 80, 90, 500, 520, 540, 9999]
    assert last_calm_round(3) == 4
    assert rounds_of(3, 2) == 8
    calm, chaos = calm_window(edges(times), 3), chaos_window(edges(times), 3, 2)
    assert calm is not None and (calm.begin_s, calm.end_s, calm.rounds) == (60, 90, 3)
    assert chaos is not None and (chaos.begin_s, chaos.end_s, chaos.rounds) == (500, 540, 2)


def test_efficiency_is_the_ratio_of_rates_and_its_error_that_of_both() -> None:
    value, error = efficiency(Window(0, 30, 3, 240, 0.3), Window(100, 200, 9, 400, 0.6))
    assert value == pytest.approx((400 / 100) / (240 / 30))
    assert error == pytest.approx(0.5 * sqrt(0.3**2 / 3 + 0.6**2 / 9))


def test_slope_is_that_of_a_straight_line_whatever_the_levels_of_the_lives() -> None:
    first = [(t, 100 + 2 * t / 3600) for t in (0, 100, 200, 400)]
    second = [(t, 30 + 2 * t / 3600) for t in (1000, 1500)]
    assert slope_per_hour([first, second]) == pytest.approx(2)
    assert slope_per_hour([[(0.0, 5.0)], []]) is None


def test_settled_life_has_lost_its_first_seconds() -> None:
    life = [(1000.0, 1.0), (1005.0, 90.0), (1060.0, 100.0), (1120.0, 101.0)]
    assert settled(life, settled_s=60) == life[2:]
    assert settled([], settled_s=60) == []


def test_growth_pools_the_lives_of_one_role_and_leaves_out_the_young() -> None:
    samples = Samples(
        memory={
            ("raylet", 1): [(t, 10 + t / 60) for t in (0.0, 60.0, 120.0)],
            ("raylet", 2): [(t, 50 + t / 60) for t in (300.0, 400.0, 520.0)],
            ("store", 3): [(0.0, 1.0), (59.0, 5.0)],
        }
    )
    assert samples.growth() == {"raylet": {"mb_per_hour": 60.0, "points": 4, "minutes": 3.0}}


def test_samples_of_this_process_have_its_memory_and_the_means_of_what_was_given() -> None:
    samples = Samples()
    for now, size in ((0.0, 4_000_000), (1.0, 6_000_000), (2.0, 2_000_000)):
        samples.take(now, {"raylet:a": os.getpid(), "raylet:b": os.getppid()}, size)
    assert samples.store_mb(0.0, 2.0) == {"mean": 4.0, "end": 2.0}
    assert samples.store_mb(5.0, 6.0) == {"mean": None, "end": None}
    assert {name for name, _ in samples.memory} == {"raylet"} and len(samples.memory) == 2
    assert all(1 < size < 100_000 for life in samples.memory.values() for _, size in life)
    assert samples.busy_cores(0.0, 0.5) is None
