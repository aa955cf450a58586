"""Corrections of a round's plans: certain batches, kept ends, margins for noise."""

from __future__ import annotations

from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import pytest

from hypha_ray.scheduler.planner import Pace, plan
from hypha_ray.scheduler.round_sizes import CorrectedAllocation, FleetProgress, cautious, correct, progress_of
from hypha_ray.scheduler.worker_state import BatchTime, Progress, WorkerState
from hypha_ray.types import Plan, Source, Span

BATCH = 8


def batch_time(*seconds: float, batches: int = 40) -> BatchTime:
    """Batch times reported one by one, over and over."""
    estimate = BatchTime()
    for value in islice(cycle(seconds), batches):
        estimate.observe(value)
    return estimate


def worker(number: int, planned: int, done: int = 0, *seconds: float) -> WorkerState:
    """A worker in round 1 with a plan of so many batches."""
    member = WorkerState(Source("run", number, 1), BATCH, batch_time(*(seconds or (1.0,))))
    spans = (Span(0, number, 0, planned * BATCH),) if planned else ()
    member.start(Plan(1, 0, spans, BATCH))
    member.progress = Progress(done, done * BATCH)
    return member


class Standing(NamedTuple):
    """Progress of a worker whose present batch began at `offset_s`."""

    done: int
    batch_s: float
    offset_s: float = 0.0


def corrected(members: list[WorkerState], fleet: list[Standing], batches: int, now_s: float) -> CorrectedAllocation:
    """Correction for so many missing batches."""
    progress = FleetProgress(
        workers=[member.source.worker for member in members],
        planned=np.array([member.planned for member in members]),
        done=np.array([standing.done for standing in fleet]),
        batch_s=np.array([standing.batch_s for standing in fleet]),
        sizes=np.full(len(fleet), BATCH),
        offset_s=np.array([standing.offset_s for standing in fleet]),
        spread=np.array([member.batch_time.spread for member in members]),
        idle=np.array([member.idle for member in members]),
    )
    planned_samples = sum(member.planned_samples for member in members)
    return correct(progress, planned_samples, batches * BATCH, now_s, equal_batches=False)


def test_batch_under_way_is_counted_so_others_do_fewer() -> None:
    members = [worker(0, 2), worker(1, 8)]
    fleet = [Standing(0, 10.0), Standing(0, 1.0)]
    correction = corrected(members, fleet, batches=6, now_s=1.0)
    assert correction.batches.tolist() == [1, 5]
    assert correction.finish_s == 10.0
    assert correction.present_finish_s == 20.0
    assert not correction.misses_target


def test_worker_near_its_end_keeps_its_plan_and_others_still_change() -> None:
    members = [worker(0, 3, 2), worker(1, 9, 2), worker(2, 3, 2)]
    fleet = [Standing(2, 1.0), Standing(2, 1.0), Standing(2, 1.0, offset_s=0.8)]
    correction = corrected(members, fleet, batches=15, now_s=0.9)
    assert correction.batches[0] == 3
    assert correction.batches[1] < 9
    assert correction.batches[2] > 3
    assert correction.batches.sum() == 15


def test_worker_near_its_end_gets_more_if_samples_are_missing() -> None:
    correction = corrected([worker(0, 3, 2)], [Standing(2, 1.0)], batches=5, now_s=0.9)
    assert correction.misses_target
    assert correction.batches.tolist() == [5]


def test_idle_worker_has_no_certain_batch() -> None:
    correction = corrected([worker(0, 4), worker(1, 0)], [Standing(0, 1.0), Standing(0, 0.1)], 4, 0.0)
    assert correction.batches[0] == 1
    assert correction.batches[1] == 3


def test_all_workers_near_their_end_keep_their_plans() -> None:
    correction = corrected([worker(0, 1), worker(1, 1)], [Standing(0, 1.0), Standing(0, 1.0)], 2, 0.9)
    assert correction.batches.tolist() == [1, 1]
    assert correction.saved_s == 0.0


def test_noisy_worker_gets_fewer_batches_than_a_steady_one_of_equal_mean() -> None:
    members = [worker(0, 10, 0, 1.0), worker(1, 10, 0, 0.6, 1.4)]
    mean_s = members[1].batch_time.mean
    assert mean_s == pytest.approx(1.0, abs=0.05)
    paces = [Pace(0, 1.0, BATCH), Pace(1, 1.0, BATCH)]
    allocation = plan(cautious(members, paces, plan(paces, 20 * BATCH)), 20 * BATCH)
    assert allocation.batches[0] > 10 > allocation.batches[1]


def test_steady_fleet_is_planned_without_margins() -> None:
    members = [worker(0, 10, 0, 0.5), worker(1, 10, 0, 2.0)]
    paces = [Pace(0, 0.5, BATCH), Pace(1, 2.0, BATCH)]
    assert cautious(members, paces, plan(paces, 20 * BATCH)) == paces


def test_spread_is_that_of_single_batches() -> None:
    assert batch_time(1.0, 1.0).spread == 0.0
    assert batch_time(0.8, 1.2).spread == pytest.approx(0.2, abs=0.03)
    of_four = BatchTime()
    for mean_s in islice(cycle((0.9, 1.1)), 40):
        of_four.observe(mean_s, 4)
    assert of_four.spread == pytest.approx(0.2, abs=0.03)


def test_silence_beyond_the_report_interval_is_no_finished_batch() -> None:
    member = worker(0, 5, 2, 2.0)
    member.progress.heard_at = 10.0
    _, progress = progress_of([member], 0.0, False, 1.0, 14.5)
    assert progress.done.tolist() == [2]
    assert progress.batch_s.tolist() == [3.5]


def test_short_batches_between_two_reports_are_counted() -> None:
    member = worker(0, 20, 4, 0.25)
    member.progress.heard_at = 10.0
    _, progress = progress_of([member], 0.0, False, 1.0, 10.6)
    assert progress.done.tolist() == [6]
