"""Correction of a round's plans while it runs, from what workers have reported.

A worker in the midst of a batch delivers that batch whatever it is told, so the batch counts as certain. A worker whose
end is near may miss a longer plan, so its plan is kept. The others share the samples that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hypha_ray.scheduler.fleet.worker_state import WorkerState, batch_seconds_column
from hypha_ray.scheduler.planning.planner import Allocation, Counts, Floats, Pace, plan_columns

CORRECTION_GAIN = 0.01
"""Relative gain in a round's length from which plans are corrected."""

LEAD_S = 0.3
"""Seconds before the end of a worker's plan within which a longer one may arrive too late."""

RISK = 1.0
"""Standard deviations of its remaining time by which a worker is expected to be late.

A round ends with its last delta. A slow worker that is late holds up the whole fleet, while a batch that it is spared
costs the others little.
"""

OVERDUE_SHARE = 0.2
"""Least part of a batch's time that a worker's present batch is expected to take on."""


@dataclass(frozen=True, slots=True)
class FleetProgress:
    """Expected progress of workers in a round, one row for each, in the order of their numbers."""

    workers: list[int]
    planned: Counts
    """Batches of each worker's plan."""
    done: Counts
    """Batches that it has probably done."""
    batch_s: Floats
    sizes: Counts
    """Samples of a batch."""
    offset_s: Floats
    """Seconds from the origin to the beginning of its present batch."""
    spread: Floats
    """Spread of its batch times, see `BatchTime`."""
    idle: npt.NDArray[np.bool_]
    """Whether it has no batch in its plan."""

    @property
    def further(self) -> Counts:
        """Batches of its present plan that each worker hasn't done."""
        further: Counts = np.maximum(0, self.planned - self.done)
        return further

    def finish_s(self) -> Floats:
        """Seconds from the origin to the expected end of each worker's present plan."""
        return self.offset_s + self.further * self.batch_s


def progress_of(
    members: Sequence[WorkerState],
    started_at: float,
    evaluating: bool,
    report_every_s: float,
    now: float,
    equal: bool = False,
) -> tuple[float, FleetProgress]:
    """Expected progress of the fleet in a round, and the time that its paces count from, on the scheduler's clock.

    Batches that a worker should have finished since its last report are counted. It would have reported any that don't
    fit into `report_every_s`, so longer silence means a slow batch that isn't finished. With `equal` batches for all,
    silence only bounds the batch time.
    """
    progresses = [member.progress for member in members]
    planned = np.array([member.planned for member in members])
    reported = np.array([progress.batches for progress in progresses])
    sizes = np.array([member.batch_size for member in members])
    variance = np.array([member.batch_time.variance for member in members])
    known_s = batch_seconds_column(members)
    idle = planned == 0
    heard_at = np.array([progress.heard_at for progress in progresses], np.float64)  # None becomes NaN.
    heard_at[idle] = now
    for row in np.flatnonzero(np.isnan(heard_at)).tolist():
        overhead_s = members[row].overhead[evaluating].mean or 0.0
        heard_at[row] = max(now, started_at + overhead_s)
    silence_s = now - heard_at
    batch_s = np.maximum(known_s, silence_s - report_every_s)
    origin = now - float(batch_s.max())
    unreported_s = silence_s if equal else np.minimum(silence_s, report_every_s)
    unreported = np.maximum(0, np.floor(unreported_s / batch_s)).astype(np.int64)
    began_at = heard_at + unreported * batch_s
    if not equal:
        began_at = np.maximum(began_at, now - (1 - OVERDUE_SHARE) * batch_s)
    done = np.minimum(reported + unreported, planned)
    offset_s = np.maximum(0.0, began_at - origin)
    workers = [member.source.worker for member in members]
    return origin, FleetProgress(workers, planned, done, batch_s, sizes, offset_s, np.sqrt(variance), idle)


@dataclass(frozen=True, slots=True)
class CorrectedAllocation:
    """New numbers of batches of workers that haven't delivered. Times in seconds, from the origin of the paces."""

    batches: Counts
    """Batches of each worker in the whole round, one row for each."""
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
    """Rest of each worker's work in a round."""

    certain: Counts
    """Number of further batches that a worker does whatever it is told."""
    closed: npt.NDArray[np.bool_]
    """Whether its plan is kept."""
    finish_s: Floats
    """Time at which its present plan is expected to end; 0 if it is idle."""
    offset_s: Floats
    """Time at which the batches after the certain ones begin."""


def correct(fleet: FleetProgress, planned_samples: int, missing: int, now_s: float, equal: bool) -> CorrectedAllocation:
    """Plan anew for the workers of a round that haven't delivered.

    Args:
        fleet: expected progress of these workers.
        planned_samples: number of samples in their present plans.
        missing: number of samples of the round's target that aren't delivered.
        now_s: present time, in seconds from the origin of the paces.
        equal: whether all workers get equally many batches; then batch times are taken as exact.

    """
    misses_target = planned_samples < missing
    remainder = _exact(fleet) if equal else _remainder(fleet, now_s, misses_target)
    kept = fleet.done + remainder.certain
    missing -= int(kept @ fleet.sizes)
    shared_finish_s, further = _shared_out(fleet, remainder, max(0, missing))
    certain_ends_s = remainder.offset_s[remainder.certain > 0]
    finish_s = float(certain_ends_s.max(initial=max(now_s, shared_finish_s)))
    return CorrectedAllocation(kept + further, finish_s, float(remainder.finish_s.max()), misses_target)


def _shared_out(fleet: FleetProgress, remainder: _Remainder, missing: int) -> tuple[float, Counts]:
    """Time at which the missing samples are delivered, and further batches of each worker whose plan isn't kept."""
    further = np.zeros_like(fleet.done)
    rows = np.flatnonzero(~remainder.closed)
    if not len(rows):
        return 0.0, further
    workers = [fleet.workers[row] for row in rows.tolist()]
    columns = fleet.batch_s[rows], fleet.sizes[rows], remainder.offset_s[rows]
    finish_s, further[rows], _ = plan_columns(workers, *columns, missing)
    return finish_s, further


def cautious(members: Sequence[WorkerState], paces: Sequence[Pace], allocation: Allocation) -> list[Pace]:
    """Paces with a margin for each worker that grows with the spread of its batch times.

    Args:
        members: the fleet.
        paces: its paces, in the same order.
        allocation: numbers of batches that the margins are for.

    """
    figures: list[tuple[float, float, int]] = []
    for member, pace in zip(members, paces, strict=True):
        figures.append((member.batch_time.spread, pace.batch_s, allocation.batches[pace.worker]))
    cautious_paces: list[Pace] = []
    for pace, margin_s in zip(paces, _margins_s(*np.array(figures).T).tolist(), strict=True):
        cautious_paces.append(Pace(pace.worker, pace.batch_s, pace.batch_size, pace.offset_s + margin_s))
    return cautious_paces


def _margins_s(spread: Floats, batch_s: Floats, batches: Counts | Floats) -> Floats:
    """Margins for the noise of so many batches, in seconds."""
    margins_s: Floats = RISK * spread * batch_s * np.sqrt(np.maximum(1, batches))
    return margins_s


def _exact(fleet: FleetProgress) -> _Remainder:
    """Rest of the work if batch times are exact, and no batch is certain."""
    none = np.zeros_like(fleet.done)
    finish_s = np.where(fleet.idle, 0.0, fleet.finish_s())
    return _Remainder(none, none.astype(np.bool_), finish_s, fleet.offset_s)


def _remainder(fleet: FleetProgress, now_s: float, may_grow: bool) -> _Remainder:
    """Rest of the work; a worker near its end keeps its plan, unless it `may_grow` because samples are missing."""
    further = fleet.further
    end_s = fleet.finish_s()
    closed = ~fleet.idle & (end_s < now_s + LEAD_S)
    if may_grow:
        closed[:] = False
    certain = np.where(closed, further, np.minimum(1, further))
    certain[fleet.idle] = 0
    margin_s = _margins_s(fleet.spread, fleet.batch_s, further)
    start_s = fleet.offset_s + certain * fleet.batch_s + margin_s
    offset_s = np.where(fleet.idle, fleet.offset_s, start_s)
    finish_s = np.where(fleet.idle, 0.0, end_s + margin_s)
    return _Remainder(certain, closed, finish_s, offset_s)
