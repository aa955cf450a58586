"""Reasons of the numbers of batches in plans, and the time at which each worker is expected to finish."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.planning.planner import Allocation

EQUAL = "equal"
"""All workers get equally many batches."""
SPEED = "speed"
"""The worker's own speed, so that all finish together."""
NOISE = "noise"
"""The worker's own speed, and fewer batches because its times differ from batch to batch."""
UNKNOWN = "unknown speed"
"""The worker has reported no batch, so that it counts as fast as the fleet's median."""
NOT_NEEDED = "not needed"
"""The worker has no batch, as the others are done by the time its first one would end."""
BEAT = "beat"
"""Without a barrier: the worker's own speed, so that its local round ends with those of the others."""
REST = "rest"
"""There are no more samples at the end of the run."""


@dataclass(slots=True)
class ReasonBook:
    """Reasons of workers' plans."""

    reasons: dict[int, str] = field(default_factory=dict)
    """Reason by worker, one of those above."""
    finish_s: dict[int, float | None] = field(default_factory=dict)
    """Seconds from the plan to the expected delta by worker; None if its speed is unknown, or it has no batch."""

    def explain(self, member: WorkerState, reason: str, wanted: int, evaluating: bool = False) -> None:
        """Explain a worker's plan.

        Args:
            member: the worker, with its plan.
            reason: the reason of the batches that it was to have.
            wanted: number of these batches.
            evaluating: whether it evaluates first.

        """
        worker = member.source.worker
        batch_s = member.batch_time.mean
        batches = member.planned
        self.reasons[worker] = REST if batches < wanted else reason
        self.finish_s[worker] = None
        if batch_s is not None and batches:
            self.finish_s[worker] = (member.overhead[evaluating].mean or 0.0) + batches * batch_s

    def fields(self, workers: Iterable[int]) -> dict[str, Any]:
        """Fields of a `plan` event of these workers."""
        known = [worker for worker in workers if worker in self.reasons]
        return {
            "reasons": {worker: self.reasons[worker] for worker in known},
            "finish_s": {worker: self.finish_s[worker] for worker in known},
        }


def reason_of(member: WorkerState, exact: Allocation, allocation: Allocation) -> str:
    """Reason of a worker's batches in a round of unequal batches.

    Args:
        member: the worker.
        exact: allocation by the workers' speeds.
        allocation: allocation with margins for noise.

    """
    worker = member.source.worker
    if member.batch_time.mean is None:
        return UNKNOWN
    if allocation.batches[worker] < exact.batches[worker]:
        return NOISE
    return SPEED if allocation.batches[worker] else NOT_NEEDED
