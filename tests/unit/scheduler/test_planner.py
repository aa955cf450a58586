"""The planner against brute force, against the reference's cases, and against the guide's own simulation."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hypha_ray.scheduler.planner import Allocation, Pace, PlannerInputError, plan

thorough = settings(deadline=None, derandomize=True, max_examples=100)
quick = settings(thorough, max_examples=50)

seconds = st.one_of(
    st.integers(1, 20).map(float),
    st.floats(0.01, 50.0),
    st.sampled_from([0.1, 0.2, 0.3, 0.7, 1e-3, 301.0]),
)
offsets = st.one_of(st.just(0.0), st.integers(0, 30).map(float), st.floats(0.0, 50.0))


def fleet_of(
    batch_s: Sequence[float], batch_sizes: Sequence[int], offsets_s: Sequence[float] | None = None
) -> list[Pace]:
    rows = zip(batch_s, batch_sizes, offsets_s or [0.0] * len(batch_s), strict=True)
    return [Pace(worker, time_s, size, offset_s) for worker, (time_s, size, offset_s) in enumerate(rows)]


@st.composite
def fleets(draw: st.DrawFn, workers: int = 8, sizes: st.SearchStrategy[int] | None = None) -> list[Pace]:
    sizes = st.integers(1, 200) if sizes is None else sizes
    numbers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=workers, unique=True))
    return [Pace(number, draw(seconds), draw(sizes), draw(offsets)) for number in numbers]


def best_finish_s(fleet: Sequence[Pace], target: int) -> float:
    """The earliest finish of all ways to share out batches, tried one by one."""
    ranges = [np.arange(-(-target // pace.batch_size) + 1) for pace in fleet]
    counts = np.meshgrid(*ranges, indexing="ij")
    samples = sum(count * pace.batch_size for count, pace in zip(counts, fleet, strict=True))
    finishes = [
        np.where(count > 0, pace.offset_s + count * pace.batch_s, 0.0)
        for count, pace in zip(counts, fleet, strict=True)
    ]
    return float(np.max(finishes, axis=0)[samples >= target].min())


def samples_by(fleet: Sequence[Pace], time_s: float) -> int:
    """Samples delivered by a moment, found by search."""

    def batches(pace: Pace) -> int:
        return bisect_right(range(1, 2**60), time_s, key=lambda n: pace.offset_s + n * pace.batch_s)

    return sum(batches(pace) * pace.batch_size for pace in fleet)


def finish_of(fleet: Sequence[Pace], allocation: Allocation) -> float:
    return max(pace.offset_s + allocation.batches[pace.worker] * pace.batch_s for pace in fleet)


# ── plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@quick
@given(fleets(workers=4, sizes=st.sampled_from([2, 3, 4, 7])), st.integers(1, 24))
def test_plan_small_fleet_is_as_early_as_brute_force(fleet: list[Pace], target: int) -> None:
    assert plan(fleet, target).finish_s == best_finish_s(fleet, target)


@thorough
@given(fleets(), st.integers(1, 3000))
def test_plan_figures_agree_with_each_other(fleet: list[Pace], target: int) -> None:
    allocation = plan(fleet, target)
    paces = {pace.worker: pace for pace in fleet}
    done = [paces[worker] for worker, batches in allocation.batches.items() if batches]
    assert set(allocation.batches) == set(paces) and min(allocation.batches.values()) >= 0
    assert allocation.samples == sum(allocation.batches[pace.worker] * pace.batch_size for pace in fleet) >= target
    assert allocation.finish_s == finish_of(done, allocation)
    last = [pace for pace in done if finish_of([pace], allocation) == allocation.finish_s]
    assert allocation.samples - target < max(pace.batch_size for pace in last)


@thorough
@given(fleets(), st.integers(1, 3000))
def test_plan_batches_in_order_of_finish_then_of_worker_are_the_first_ones(fleet: list[Pace], target: int) -> None:
    assume(sum(target / pace.batch_size for pace in fleet) < 5000)
    events = sorted(
        (pace.offset_s + n * pace.batch_s, pace.worker, pace.batch_size)
        for pace in fleet
        for n in range(1, -(-target // pace.batch_size) + 1)
    )
    expected, left = {pace.worker: 0 for pace in fleet}, target
    for _, worker, size in events:
        if left > 0:
            expected[worker] += 1
            left -= size
    assert plan(fleet, target).batches == expected


@pytest.mark.parametrize(
    ("batch_ms", "batch_sizes", "target", "wall_s", "samples", "batches"),
    [
        ([950, 800, 500], [150, 100, 50], 800, 2.4, 800, [2, 3, 4]),
        ([50, 60], [600, 600], 12_000, 0.55, 12_000, [11, 9]),
        ([500, 500], [16, 16], 1920, 30.0, 1920, [60, 60]),
        ([200, 2000], [16, 16], 1760, 20.0, 1760, [100, 10]),
        ([200, 5000], [16, 16], 2500, 30.2, 2512, [151, 6]),
        ([400, 700, 3000], [80, 80, 30], 20_000, 62.0, 20_040, [155, 88, 20]),
    ],
)
def test_plan_reference_fleets_stop_at_the_best_common_time(
    batch_ms: list[int], batch_sizes: list[int], target: int, wall_s: float, samples: int, batches: list[int]
) -> None:
    allocation = plan(fleet_of([ms / 1000 for ms in batch_ms], batch_sizes), target)
    assert allocation.finish_s == pytest.approx(wall_s)
    assert (allocation.samples, list(allocation.batches.values())) == (samples, batches)


def test_plan_equal_workers_give_the_rest_to_the_lowest_numbers() -> None:
    fleet = [Pace(worker, 0.1, 8) for worker in (7, 1, 3)]
    assert plan(fleet, 8 * 10 + 1).batches == {1: 4, 3: 4, 7: 3}


@pytest.mark.parametrize("target", [0, -5])
def test_plan_reached_target_needs_nothing(target: int) -> None:
    assert plan([Pace(2, 1.0, 4), Pace(5, 1.0, 4)], target) == Allocation(0.0, {2: 0, 5: 0}, 0)


@pytest.mark.parametrize("target", [10**9, 10**12, 10**15])
@pytest.mark.parametrize(
    "fleet",
    [
        fleet_of([1e-3, 1e3, 7.3], [1, 1000, 13], [0.0, 12.5, 1e4]),
        fleet_of([1e-9, 1e9], [1, 1]),
        fleet_of([1e-9, 1e9, 1e-9], [1, 1, 10**9], [1e9, 0.0, 1e9]),
        fleet_of([301.0], [1]),
        fleet_of([1.0 + i % 7 for i in range(500)], [1 + i % 1000 for i in range(500)]),
    ],
    ids=["mixed", "extremes", "late and fast", "one slow", "many"],
)
def test_plan_huge_target_is_reached_and_not_a_batch_too_late(fleet: list[Pace], target: int) -> None:
    allocation = plan(fleet, target)
    assert samples_by(fleet, allocation.finish_s) >= allocation.samples >= target
    assert samples_by(fleet, math.nextafter(allocation.finish_s, 0.0)) < target
    done = [pace for pace in fleet if allocation.batches[pace.worker]]
    last = [pace.batch_size for pace in done if finish_of([pace], allocation) == allocation.finish_s]
    assert allocation.samples < target + max(last)


@thorough
@given(fleets(), st.integers(1, 3000), st.integers(0, 500))
def test_plan_larger_target_never_ends_earlier(fleet: list[Pace], target: int, more: int) -> None:
    assert plan(fleet, target).finish_s <= plan(fleet, target + more).finish_s


@thorough
@given(fleets(), seconds, st.integers(1, 200), offsets, st.integers(1, 3000))
def test_plan_added_worker_never_ends_later(
    fleet: list[Pace], batch_s: float, size: int, offset_s: float, target: int
) -> None:
    assert plan([*fleet, Pace(100, batch_s, size, offset_s)], target).finish_s <= plan(fleet, target).finish_s


@pytest.mark.slow
@thorough
@given(fleets(), st.floats(1.001, 50.0), st.booleans(), st.integers(1, 3000))
def test_plan_faster_worker_never_gets_fewer_batches(
    fleet: list[Pace], slowdown: float, slow_first: bool, target: int
) -> None:
    fast = replace(fleet[0], worker=200)
    slow = replace(fast, worker=100 if slow_first else 300, batch_s=fast.batch_s * slowdown)
    batches = plan([*fleet, fast, slow], target).batches
    assert batches[fast.worker] >= batches[slow.worker]


@pytest.mark.slow
@thorough
@given(fleets(), st.integers(-10, 10), st.integers(1, 3000))
def test_plan_other_unit_of_time_changes_only_the_finish(fleet: list[Pace], exponent: int, target: int) -> None:
    factor = 2.0**exponent
    scaled = [replace(pace, batch_s=pace.batch_s * factor, offset_s=pace.offset_s * factor) for pace in fleet]
    once, twice = plan(fleet, target), plan(scaled, target)
    assert twice == replace(once, finish_s=once.finish_s * factor)


@pytest.mark.slow
@thorough
@given(fleets(), st.randoms(), st.integers(1, 3000))
def test_plan_order_of_the_fleet_is_without_effect(fleet: list[Pace], dice: Random, target: int) -> None:
    shuffled = list(fleet)
    dice.shuffle(shuffled)
    assert plan(shuffled, target) == plan(fleet, target)


BAD_FLEETS = {
    "nobody": [],
    "worker twice": [Pace(1, 1.0, 1), Pace(2, 1.0, 1), Pace(1, 2.0, 1)],
    "batch of nothing": [Pace(0, 1.0, 0)],
    "negative batch": [Pace(0, 1.0, -3)],
    "half a sample": [Pace(0, 1.0, 1.5)],  # type: ignore[arg-type]
    "no time": [Pace(0, 0.0, 1)],
    "negative time": [Pace(0, 1.0, 1), Pace(1, -1.0, 1)],
    "time not a number": [Pace(0, math.nan, 1)],
    "infinite time": [Pace(0, math.inf, 1)],
    "negative offset": [Pace(0, 1.0, 1, -0.1)],
    "offset not a number": [Pace(0, 1.0, 1, math.nan)],
    "infinite offset": [Pace(0, 1.0, 1, math.inf)],
}


@pytest.mark.parametrize("target", [0, 10])
@pytest.mark.parametrize("fleet", BAD_FLEETS.values(), ids=BAD_FLEETS)
def test_plan_impossible_fleet_is_an_error(fleet: list[Pace], target: int) -> None:
    with pytest.raises(PlannerInputError):
        plan(fleet, target)


@pytest.mark.parametrize("target", [1.5, math.nan, math.inf, True, 10**16])
def test_plan_impossible_target_is_an_error(target: int) -> None:
    with pytest.raises(PlannerInputError, match=r"PLN003.*the target can't be planned for"):
        plan([Pace(0, 1.0, 1)], target)


def test_plan_error_names_the_worker_and_the_figure() -> None:
    with pytest.raises(PlannerInputError, match=r"batch_s of worker 4 .* got nan"):
        plan([Pace(3, 1.0, 1), Pace(4, math.nan, 1)], 10)
