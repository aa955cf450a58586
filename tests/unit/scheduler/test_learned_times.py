"""Times that the scheduler learns of a worker from its deltas."""

from __future__ import annotations

import pytest

from hypha_ray.scheduler.worker_state import WorkerState
from hypha_ray.types import Delta, Report, Source, Span

SOURCE = Source("test", 0, 0)


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
