"""Correction of a round's plans while it runs, from what workers have reported.

A worker in the midst of a batch delivers that batch whatever it is told, so the batch counts as certain. A worker whose
end is near may miss a longer plan, so its plan is kept. The others share the samples that are missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hypha_ray.scheduler.fleet.worker_state import ExpectedProgress, WorkerState
from hypha_ray.scheduler.planning.planner import Allocation, Pace
from hypha_ray.scheduler.planning.planner import plan as plan_batches

CORRECTION_GAIN = 0.01
"""Relative gain in a round's length from which plans are corrected."""

LEAD_S = 0.3
"""Seconds before the end of a worker's plan within which a longer one may arrive too late."""

RISK = 1.0
"""Standard deviations of its remaining time by which a worker is expected to be late.

A round ends with its last delta. A slow worker that is late holds up the whole fleet, while a batch that it is spared
costs the others little.
"""


@dataclass(frozen=True, slots=True)
class CorrectedAllocation:
    """New numbers of batches of workers that haven't delivered. Times in seconds, from the origin of the paces."""

    batches: dict[int, int]
    """Batches of each worker in the whole round."""
    finish_s: float
    """Time at which the new plans are expected to end."""
    present_finish_s: float
    """Time at which the present plans are expected to end; 0 if all workers are idle."""
    misses_target: bool
    """Whether the present plans have too few samples."""

    @property
    def saved_s(self) -> float:
        """Time by which the round is expected to end earlier."""
        return self.present_finish_s - self.finish_s


@dataclass(frozen=True, slots=True)
class _Remainder:
    """Rest of a worker's work in a round."""

    certain: int
    """Number of further batches that the worker does whatever it is told."""
    closed: bool
    """Whether its plan is kept."""
    finish_s: float
    """Time at which its present plan is expected to end; 0 if it is idle."""
    pace: Pace
    """Pace after the certain batches."""


def correct(
    members: Sequence[WorkerState], fleet: Sequence[ExpectedProgress], missing: int, now_s: float, equal: bool
) -> CorrectedAllocation:
    """Plan anew for the workers of a round that haven't delivered.

    Args:
        members: these workers.
        fleet: their expected progress, in the same order.
        missing: number of samples of the round's target that aren't delivered.
        now_s: present time, in seconds from the origin of the paces.
        equal: whether all workers get equally many batches; then batch times are taken as exact.

    """
    misses_target = sum(member.planned_samples for member in members) < missing
    remainders: list[_Remainder] = []
    for member, standing in zip(members, fleet, strict=True):
        remainder = _exact(member, standing) if equal else _remainder(member, standing, now_s, misses_target)
        remainders.append(remainder)
        missing -= (standing.done + remainder.certain) * standing.pace.batch_size
    paces = [remainder.pace for remainder in remainders if not remainder.closed]
    allocation = plan_batches(paces, max(0, missing)) if paces else Allocation(0.0, {}, 0)
    finish_s = max(now_s, allocation.finish_s)
    batches: dict[int, int] = {}
    for standing, remainder in zip(fleet, remainders, strict=True):
        worker = standing.pace.worker
        batches[worker] = standing.done + remainder.certain + allocation.batches.get(worker, 0)
        if remainder.certain:
            finish_s = max(finish_s, remainder.pace.offset_s)
    present_finish_s = max(remainder.finish_s for remainder in remainders)
    return CorrectedAllocation(batches, finish_s, present_finish_s, misses_target)


def cautious(members: Sequence[WorkerState], paces: Sequence[Pace], allocation: Allocation) -> list[Pace]:
    """Paces with a margin for each worker that grows with the spread of its batch times.

    Args:
        members: the fleet.
        paces: its paces, in the same order.
        allocation: numbers of batches that the margins are for.

    """
    cautious_paces: list[Pace] = []
    for member, pace in zip(members, paces, strict=True):
        margin_s = _margin_s(member, pace, allocation.batches[pace.worker])
        cautious_paces.append(Pace(pace.worker, pace.batch_s, pace.batch_size, pace.offset_s + margin_s))
    return cautious_paces


def _margin_s(member: WorkerState, pace: Pace, batches: int) -> float:
    return RISK * member.batch_time.spread * pace.batch_s * math.sqrt(max(1, batches))


def _further(member: WorkerState, standing: ExpectedProgress) -> int:
    """Number of batches of its present plan that a worker hasn't done."""
    return max(0, member.planned - standing.done)


def _exact(member: WorkerState, standing: ExpectedProgress) -> _Remainder:
    """Rest of a worker's work if its batch time is exact, and no batch is certain."""
    pace = standing.pace
    finish_s = 0.0 if member.idle else pace.offset_s + _further(member, standing) * pace.batch_s
    return _Remainder(0, False, finish_s, pace)


def _remainder(member: WorkerState, standing: ExpectedProgress, now_s: float, may_grow: bool) -> _Remainder:
    """Rest of a worker's work; near its end its plan is kept, unless it `may_grow` because samples are missing."""
    pace = standing.pace
    if member.idle:
        return _Remainder(0, False, 0.0, pace)
    further = _further(member, standing)
    end_s = pace.offset_s + further * pace.batch_s
    closed = not may_grow and end_s < now_s + LEAD_S
    certain = further if closed else min(1, further)
    margin_s = _margin_s(member, pace, further)
    start_s = pace.offset_s + certain * pace.batch_s + margin_s
    later = Pace(pace.worker, pace.batch_s, pace.batch_size, start_s)  # Much quicker than `replace`.
    return _Remainder(certain, closed, end_s + margin_s, later)
