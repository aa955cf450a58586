"""Times that the scheduler knows of a worker: learned from its deltas, and decayed estimates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.scheduler.planner import Pace, plan
from hypha_ray.scheduler.worker_state import BatchTime, Decayed, WorkerState
from hypha_ray.types import Delta, Report, Source, Span

thorough = settings(deadline=None, derandomize=True, max_examples=200)

durations = st.floats(1e-6, 1e6)
observations = st.lists(st.tuples(durations, st.integers(1, 100)), min_size=1, max_size=40)
SOURCE = Source("test", 0, 0)


def batch_time_of(*seconds: float, half_life: float = 16.0) -> BatchTime:
    found = BatchTime(half_life)
    for value in seconds:
        found.observe(value)
    return found


def mean_of(estimate: Decayed) -> float:
    assert estimate.mean is not None
    return estimate.mean


def test_batch_time_without_observations_is_absent() -> None:
    assert BatchTime().mean is None


def test_batch_time_first_observation_is_the_estimate() -> None:
    assert batch_time_of(0.7).mean == 0.7


def test_batch_time_reference_inputs_give_their_running_mean_when_nothing_decays() -> None:
    means = [mean_of(batch_time_of(*[1050, 1000, 1025, 2050][:n], half_life=1e9)) for n in range(1, 5)]
    assert means == pytest.approx([1050, 1025, 1025, 1281.25])


def test_batch_time_past_counts_half_after_a_half_life() -> None:
    estimate = batch_time_of(*[1.0] * 400, half_life=10)
    estimate.observe(1.5, 10)
    assert estimate.mean == pytest.approx(1.25)


def test_batch_time_one_report_of_many_batches_weighs_like_many_reports() -> None:
    once, often = batch_time_of(1.0), batch_time_of(1.0, *[1.3] * 7)
    once.observe(1.3, 7)
    assert once.mean == pytest.approx(often.mean)


@pytest.mark.slow
@thorough
@given(observations)
def test_batch_time_stays_between_the_least_and_the_greatest_observation(seen: list[tuple[float, int]]) -> None:
    estimate = BatchTime()
    for seconds, count in seen:
        estimate.observe(seconds, count)
    assert min(seen)[0] <= mean_of(estimate) <= max(seen)[0]


@pytest.mark.slow
@thorough
@given(
    st.floats(1e-3, 1e3),
    st.lists(st.tuples(st.floats(0.8, 1.2), st.integers(1, 50)), min_size=1, max_size=30),
    st.sampled_from([100.0, 0.01, 1e9, 1e-9]),
    st.integers(1, 1000),
)
def test_batch_time_one_outlier_changes_it_at_most_twofold(
    scale: float, seen: list[tuple[float, int]], outlier: float, count: int
) -> None:
    estimate = BatchTime()
    for ratio, batches in seen:
        estimate.observe(scale * ratio, batches)
    before = mean_of(estimate)
    estimate.observe(before * outlier, count)
    assert before / 2 <= mean_of(estimate) <= before * 2
    for ratio, batches in seen:
        estimate.observe(scale * ratio, batches)
        assert before / 2.5 <= mean_of(estimate) <= before * 2.5


@pytest.mark.parametrize("factor", [4.0, 0.25, 1000.0])
def test_batch_time_lasting_change_is_believed_at_the_second_observation(factor: float) -> None:
    estimate = batch_time_of(*[1.0] * 100, factor)
    assert 0.5 <= mean_of(estimate) <= 2.0
    estimate.observe(factor)
    assert estimate.mean == factor


def test_batch_time_change_is_believed_as_far_as_two_observations_agree() -> None:
    assert batch_time_of(*[1.0] * 100, 100.0, 3.0).mean == 3.0
    assert batch_time_of(*[1.0] * 100, 0.01, 0.3).mean == 0.3


def test_batch_time_accidents_on_both_sides_are_not_a_change() -> None:
    assert 0.5 <= mean_of(batch_time_of(*[1.0] * 100, 100.0, 0.01, 100.0)) <= 2.0


def test_batch_time_accident_at_the_very_first_is_forgotten_soon() -> None:
    assert batch_time_of(100.0, 1.0, 1.0).mean == 1.0


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_batch_time_nonsense_is_ignored(nonsense: float) -> None:
    estimate, calm = batch_time_of(1.0, nonsense, 1.2, nonsense), batch_time_of(1.0, 1.2)
    assert estimate.mean == calm.mean
    assert batch_time_of(nonsense).mean is None


def test_batch_time_of_no_batches_is_ignored() -> None:
    estimate = batch_time_of(1.0)
    estimate.observe(2.0, 0)
    assert estimate.mean == 1.0


def test_batch_time_fading_brings_an_unused_worker_back_into_the_plan() -> None:
    slow, rounds = batch_time_of(1.0, 500.0, 500.0), 0
    while not plan([Pace(0, 1.0, 4), Pace(1, mean_of(slow), 4)], 200).batches[1]:
        slow.fade(0.5)
        rounds += 1
    assert 0 < rounds < 10


def test_batch_time_after_fading_takes_the_next_observation_as_it_is() -> None:
    estimate = batch_time_of(*[1.0] * 50)
    for _ in range(10):
        estimate.fade(0.5)
    estimate.observe(1.4)
    assert estimate.mean == 1.4


def test_batch_time_fading_before_any_observation_is_harmless() -> None:
    estimate = BatchTime()
    estimate.fade(0.5)
    estimate.observe(1.0)
    assert estimate.mean == 1.0


def test_decayed_takes_zero_for_a_duration() -> None:
    estimate = Decayed()
    for seconds in (0.0, 0.0, 0.4, 0.4):
        estimate.observe(seconds)
    assert estimate.mean == 0.4


def test_decayed_follows_a_slow_drift() -> None:
    estimate = Decayed(half_life=2)
    for step in range(100):
        estimate.observe(1.0 + 0.1 * step)
    assert 10.0 < mean_of(estimate) < 10.9


def delta_of(number: int, batches: int) -> Delta:
    samples = 8 * batches
    spans = (Span(0, 0, 0, samples),) if samples else ()
    return Delta(SOURCE, number, spans, samples, samples, samples, batches, 3.0, 1, 1000, 0.0, 0.0)


@pytest.mark.parametrize(
    ("number", "batches", "evaluated", "batch_s"),
    [(1, 1, False, 3.4), (1, 2, False, 1.7), (0, 1, False, None), (1, 1, True, None), (1, 0, False, None)],
)
def test_worker_without_a_timed_batch_is_known_by_its_delta(
    number: int, batches: int, evaluated: bool, batch_s: float | None
) -> None:
    """Not by that of the first round, which warms up caches, and not by one with an evaluation."""
    member = WorkerState(SOURCE, 8)
    member.delivered(delta_of(number, batches), 3.4, evaluated)
    assert member.batch_time.mean == batch_s
    assert member.overhead[evaluated].mean is None


def test_worker_with_timed_batches_is_known_by_these() -> None:
    member = WorkerState(SOURCE, 8)
    member.report(Report(SOURCE, 1, 3, 24, 24, 24, 3.0, 2.0, 2, 0.0, 1e-3), 10.0)
    member.delivered(delta_of(1, 3), 3.4, False)
    assert member.batch_time.mean == 1.0
    assert member.overhead[False].mean == pytest.approx(0.4)
