"""Validation of the weights: rounds that begin with one, and each worker's share."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.scheduler.fleet.worker_state import WorkerState, batch_seconds, has_equal_batches
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.types import SliceInfo, Span, window


class ValidationSamples:
    """Samples of the validation split, divided among the workers.

    Args:
        job: the job file.
        slices: the dataset's slices, of both splits.
        past: point from which the run goes on.

    """

    def __init__(self, job: Job, slices: Sequence[SliceInfo], past: ResumePoint) -> None:
        self._every = job.rounds.evaluate_every
        self._last = job.rounds.update_rounds
        self._equal = has_equal_batches(job)
        self._spans = tuple(Span(0, s.index, 0, s.samples) for s in slices if s.split == "validation")
        self._evaluated = past.next_round if past.evaluated else None
        """Version of the weights whose evaluation an earlier attempt has recorded; None without one."""

    def is_due(self, number: int) -> bool:
        """Whether the weights that round `number` starts from are to be evaluated."""
        every = self._every
        last = number == self._last
        due = number > 0 and (last or (every > 0 and number % every == 0))
        return bool(self._spans) and due and number != self._evaluated

    def shares(self, members: Sequence[WorkerState]) -> dict[int, tuple[Span, ...]]:
        """Validation samples for each worker, in proportion to its speed."""
        seconds = batch_seconds(members, self._equal)
        speeds = {member.source.worker: member.batch_size / seconds[member.source.worker] for member in members}
        samples = sum(span.samples for span in self._spans)
        shares: dict[int, tuple[Span, ...]] = {}
        start = 0
        before = 0.0
        total = sum(speeds.values())
        for worker, speed in speeds.items():
            before += speed
            stop = round(samples * before / total)
            if stop > start:
                shares[worker] = window(self._spans, start, stop)
            start = stop
        return shares
