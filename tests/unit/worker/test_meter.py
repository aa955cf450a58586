"""Counts and times of a worker's round: what is timed, and what isn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import ReportSchedule
from hypha_ray.optim.step import Step
from hypha_ray.types import Source, Sums, means
from hypha_ray.worker import batches as module
from hypha_ray.worker.batches import Meter


class Clock:
    """A clock that a test sets, in seconds."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    return found


def begun(clock: Clock) -> Meter:
    return meter_by(clock, ReportSchedule(10.0))


def meter_by(clock: Clock, schedule: ReportSchedule) -> Meter:
    now = clock.now
    return Meter(Source("test", 0, 0), 3, schedule, _began_s=now, _reported_s=now, _timed_s=now)


def step(meter: Meter, clock: Clock, seconds: float, waited_s: float = 0.0, sums: Sums | None = None) -> None:
    with meter.waiting():
        clock.now += waited_s
    clock.now += seconds
    meter.step(Step(torch.tensor(2.0), 8, torch.tensor(1.0), 40, sums or {}), 4, 0.1)


def test_first_batch_of_a_round_is_not_timed_and_all_others_are(clock: Clock) -> None:
    meter = begun(clock)
    step(meter, clock, 7.0)  # Cold caches.
    for _ in range(3):
        step(meter, clock, 1.5, waited_s=0.5)
    first = meter.report()
    assert (first.batches, first.timed_batches, first.seconds, first.data_wait_s) == (4, 3, 6.0, 1.5)
    step(meter, clock, 2.0)
    second = meter.report()
    assert (second.batches, second.timed_batches, second.seconds, second.data_wait_s) == (1, 1, 2.0, 0.0)
    assert meter.train_s == 7.0 + 6.0 + 2.0


def test_report_after_the_first_batch_times_nothing(clock: Clock) -> None:
    meter = begun(clock)
    step(meter, clock, 7.0)
    first = meter.report()
    assert (first.batches, first.timed_batches, first.seconds) == (1, 0, 0.0)
    step(meter, clock, 1.5)
    assert (meter.report().timed_batches, meter.due, meter.pending) == (1, False, False)


def test_reports_are_never_later_than_the_first_batch_that_ends_after_the_interval(clock: Clock) -> None:
    """The first report too: a scheduler that hears nothing for longer takes the worker to be slow."""
    meter = begun(clock)
    reported = []
    for number in range(1, 10):
        step(meter, clock, 4.0)
        if meter.due:
            report = meter.report()
            reported.append((number, report.timed_batches, report.seconds))
    assert reported == [(3, 2, 8.0), (6, 3, 12.0), (9, 3, 12.0)]


def reported_batches(clock: Clock, schedule: ReportSchedule, planned: int, batch_s: float) -> list[int]:
    """Batches after which a worker with so many planned batches of four samples reports before it hands over."""
    meter = meter_by(clock, schedule)
    meter.planned = 4 * planned
    reported: list[int] = []
    for number in range(1, planned):
        step(meter, clock, batch_s)
        if meter.due:
            meter.report()
            reported.append(number)
    return reported


def test_reports_halve_the_rest_at_the_end_of_a_plan_that_may_change(clock: Clock) -> None:
    halving = ReportSchedule(10.0, halves_rest=True)
    assert reported_batches(clock, ReportSchedule(10.0), 25, 1.0) == [10, 20]
    assert reported_batches(clock, halving, 25, 1.0) == [9, 15, 19, 21, 23, 24]
    assert reported_batches(clock, halving, 33, 0.5) == [11, 19, 24, 27, 29, 31]


def test_a_longer_plan_puts_the_next_report_off(clock: Clock) -> None:
    meter = meter_by(clock, ReportSchedule(10.0, halves_rest=True))
    meter.planned = 4 * 6
    step(meter, clock, 1.0)
    step(meter, clock, 1.0)
    assert meter.due
    meter.planned = 4 * 7
    assert not meter.due


@pytest.mark.parametrize(
    ("tables", "halves"),
    [
        ({}, True),
        ({"resources": {"num_workers": 65}}, False),
        ({"run": {"mode": "replay"}}, False),
        ({"sync": {"dynamic_local_steps": False}}, False),
        ({"sync": {"strategy": "async"}}, False),
        ({"sync": {"strategy": "sync"}}, False),
    ],
)
def test_reports_halve_the_rest_only_where_each_corrects_the_plans(tables: dict[str, Any], halves: bool) -> None:
    assert ReportSchedule.of(Job.model_validate(tables)).halves_rest is halves


def test_time_between_a_pause_and_the_next_batch_does_not_count(clock: Clock) -> None:
    meter = begun(clock)
    step(meter, clock, 7.0)
    meter.pause()
    clock.now += 1000.0
    step(meter, clock, 1.5)
    report = meter.report()
    assert (report.timed_batches, report.seconds, meter.train_s) == (1, 1.5, 8.5)


def test_figures_of_steps_are_summed_for_each_report_and_for_the_round(clock: Clock) -> None:
    meter = begun(clock)
    step(meter, clock, 1.0, sums={"reward": (2.0, 4.0)})
    step(meter, clock, 1.0, sums={"reward": (1.0, 4.0), "entropy": (3.0, 1.0)})
    assert meter.report().sums == {"reward": (3.0, 8.0), "entropy": (3.0, 1.0)}
    step(meter, clock, 1.0, sums={"reward": (4.0, 4.0)})
    assert meter.report().sums == {"reward": (4.0, 4.0)}
    assert meter.sums == {"reward": (7.0, 12.0), "entropy": (3.0, 1.0)}


def test_times_of_parts_of_a_step_are_means_over_batches_beside_its_figures(clock: Clock) -> None:
    meter = begun(clock)
    for seconds, reward in ((1.5, 3.0), (2.5, 1.0)):
        figures = {"reward": (reward, 4.0)}
        meter.step(Step(torch.tensor(2.0), 8, torch.tensor(1.0), 40, figures, times={"training_s": seconds}), 4, 0.1)
    assert means(meter.report().sums) == {"reward": 0.5, "training_s": 2.0}
