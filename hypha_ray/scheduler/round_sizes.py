"""Sizes of rounds, and correction of a round's plans while it runs, from what workers have reported.

A worker that has begun a batch delivers it even if its plan becomes shorter, so the batch counts as certain. A worker
whose end is near may miss a longer plan, so its plan is kept. The others share the samples that are missing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hypha_ray.config import Job
from hypha_ray.fleet_time import FleetTime
from hypha_ray.scheduler.planner import Allocation, Counts, Floats, Pace, plan_columns
from hypha_ray.scheduler.worker_state import WorkerState, batch_seconds_column, makes_up

LARGEST_STEP = 2.0
"""Largest factor by which rounds grow at once."""
MOST = 16
"""Largest number of samples of a round, in multiples of `rounds.samples_between_updates`."""
STATE = "round_growth"
"""Key of the state in a commit."""
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
"""Least part of a batch's time that a worker's present batch is expected to take from now on."""


class RoundSizes:
    """Samples of the rounds to come, which grow until exchanges take at most `rounds.max_exchange_share` of the time.

    An exchange takes as long whatever the round's samples are, while all other time grows with them. So a part `s` of
    the time falls to the limit `L` in rounds with ``s (1 − L) / (L (1 − s))`` times as many samples.

    Args:
        job: the job file.
        state: state of the last commit; empty before the first.

    """

    def __init__(self, job: Job, state: Mapping[str, Any]) -> None:
        saved_sizes = state.get(STATE, {})
        self._job = job
        self._share_limit = job.rounds.max_exchange_share
        self._usual_samples = job.rounds.samples_between_updates
        self.samples = max(self._usual_samples, int(saved_sizes.get("samples", 0)))
        """Samples of the next round."""
        self.exchange_share: float | None = None
        """Part of exchanges in the time of the round that was judged last; None before the first."""
        self._position = float(saved_sizes.get("position", 0.0))
        """Rounds of the usual length that the planned ones amount to."""
        self._first_judged: int | None = max(1, job.rounds.warmup_rounds)
        """First round that is judged, as the earlier ones have other samples; None: longer ones are to begin."""

    def observe(self, round_number: int, time: FleetTime) -> None:
        """Judge the time of a round once its record is written."""
        if (
            self._share_limit is None
            or self._first_judged is None
            or round_number < self._first_judged
            or time.total_s <= 0
        ):
            return
        self.exchange_share = share = time.seconds["exchange"] / time.total_s
        most_samples = MOST * self._usual_samples
        if share <= self._share_limit or self.samples >= most_samples:
            return
        factor = LARGEST_STEP
        if share < 1:
            factor = min(factor, share * (1 - self._share_limit) / (self._share_limit * (1 - share)))
        self.samples = min(most_samples, max(self.samples + 1, math.ceil(factor * self.samples)))
        self._first_judged = None

    def begin(self, round_number: int) -> None:
        """Judge again from this round on, the first one of the new length."""
        self._first_judged = round_number

    def progress(self, round_number: int, samples: int) -> tuple[float, float] | None:
        """Place of a planned round in the schedules, in rounds of the usual length; None: its own number says it.

        A run that ends by samples has fewer rounds if they grow.
        """
        if self._share_limit is None or self._job.rounds.epochs is None:
            return None
        start = self._position
        self._position += 1.0 if round_number < self._job.rounds.warmup_rounds else samples / self._usual_samples
        return start, self._position

    def state(self) -> dict[str, Any]:
        """State for a later attempt; empty if rounds don't grow."""
        if self._share_limit is None:
            return {}
        return {STATE: {"samples": self.samples, "position": self._position}}


def longest_round(job: Job) -> int:
    """Samples of the longest round that a job may have."""
    longest = job.samples(job.rounds.warmup_rounds)
    if job.rounds.max_exchange_share is not None:
        longest *= MOST
    return max(job.samples(0), longest)


class RoundSamples:
    """Samples of each round that is to come, with a barrier, if the run ends when its epochs' samples are used.

    Each round has as many as the job says, and the last one the rest. That one exchanges all fragments, so rounds
    before it leave it some samples. Lost samples are made up by the rounds that follow, or by further ones after the
    last.

    Args:
        job: the job, with the number of rounds that its epochs take.
        first_round: number of the first round to come.
        unused_samples: samples that no commit has used.

    """

    def __init__(self, job: Job, first_round: int, unused_samples: int) -> None:
        self._job = job
        self._last_round = job.rounds.update_rounds - 1
        self._makes_up = makes_up(job)
        self._least_samples = min(job.num_workers, job.rounds.samples_between_updates)
        """Samples that each later round keeps at least."""
        self._most_samples: int | None = None
        """Samples of a round if there are fewer than the rounds usually have, as without a damaged slice."""
        rounds = self._last_round + 1 - first_round
        samples_before_last = self._between(first_round, self._last_round)
        if rounds > 1 and unused_samples <= samples_before_last:
            self._most_samples = -(-unused_samples // rounds)
            samples_before_last = self._between(first_round, self._last_round)
        self._last_samples = min(max(1, unused_samples - samples_before_last), self._usual_samples(self._last_round))
        """Samples of the last round."""

    def target(self, round_number: int, free_samples: int) -> int:
        """Samples that a round is to have.

        Args:
            round_number: number of the round.
            free_samples: samples that are neither used nor of an earlier round.

        """
        usual_samples = self._usual_samples(round_number)
        limit = free_samples - self.reserve(round_number, free_samples)
        samples = usual_samples
        if self._makes_up:
            missing_samples = free_samples - self._after(round_number)
            samples = max(self._least_samples, min(missing_samples, 2 * usual_samples))
        return max(1, min(samples, limit))

    def reserve(self, round_number: int, free_samples: int) -> int:
        """Samples that a round leaves to later ones at least."""
        later_rounds = max(0, self._last_round - round_number)
        return max(0, min(later_rounds * self._least_samples, free_samples - self._least_samples))

    def _after(self, round_number: int) -> int:
        """Samples that are to be left after a round."""
        if round_number >= self._last_round:
            return 0
        return self._between(round_number + 1, self._last_round) + self._last_samples

    def _between(self, first_round: int, stop_round: int) -> int:
        """Usual samples of the rounds from `first_round` to the one before `stop_round`."""
        warmup_stop = min(max(first_round, self._job.rounds.warmup_rounds), stop_round)
        samples = 0
        if warmup_stop > first_round:
            samples += (warmup_stop - first_round) * self._usual_samples(first_round)
        if stop_round > warmup_stop:
            samples += (stop_round - warmup_stop) * self._usual_samples(warmup_stop)
        return samples

    def _usual_samples(self, round_number: int) -> int:
        samples = self._job.samples(round_number)
        return samples if self._most_samples is None else min(samples, self._most_samples)


def fitted(samples_by_worker: Mapping[int, int], needy: Collection[int], samples: int) -> dict[int, int]:
    """Workers' samples, cut from the last worker on until they are `samples` together.

    A worker in `needy` keeps at least one, also if there are more together then.
    """
    fitting_samples = dict(samples_by_worker)
    excess_samples = sum(fitting_samples.values()) - samples
    for worker in reversed(fitting_samples):
        if excess_samples <= 0:
            break
        least_samples = 1 if worker in needy else 0
        cut_samples = min(excess_samples, max(0, fitting_samples[worker] - least_samples))
        fitting_samples[worker] -= cut_samples
        excess_samples -= cut_samples
    return fitting_samples


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
        further_batches: Counts = np.maximum(0, self.planned - self.done)
        return further_batches

    def finish_s(self) -> Floats:
        """Seconds from the origin to the expected end of each worker's present plan."""
        return self.offset_s + self.further * self.batch_s


def progress_of(
    members: Sequence[WorkerState],
    started_at: float,
    evaluating: bool,
    report_every_s: float,
    now: float,
    equal_batches: bool = False,
) -> tuple[float, FleetProgress]:
    """Expected progress of the fleet in a round, and the time that its paces count from, on the scheduler's clock.

    Batches that a worker should have finished since its last report are counted. It would have reported any that don't
    fit into `report_every_s`, so longer silence means a slow batch that isn't finished. With equal batches for all,
    silence only bounds the batch time.
    """
    progresses = [member.progress for member in members]
    planned = np.array([member.planned for member in members])
    reported_batches = np.array([progress.batches for progress in progresses])
    sizes = np.array([member.batch_size for member in members])
    variance = np.array([member.batch_time.variance for member in members])
    known_s = batch_seconds_column(members)
    is_idle = planned == 0
    heard_at = np.array([progress.heard_at for progress in progresses], np.float64)  # None becomes NaN.
    heard_at[is_idle] = now
    for row in np.flatnonzero(np.isnan(heard_at)).tolist():
        overhead_s = members[row].overhead[evaluating].mean or 0.0
        heard_at[row] = max(now, started_at + overhead_s)
    silence_s = now - heard_at
    batch_s = np.maximum(known_s, silence_s - report_every_s)
    origin = now - float(batch_s.max())
    unreported_s = silence_s if equal_batches else np.minimum(silence_s, report_every_s)
    unreported_batches = np.maximum(0, np.floor(unreported_s / batch_s)).astype(np.int64)
    began_at = heard_at + unreported_batches * batch_s
    if not equal_batches:
        began_at = np.maximum(began_at, now - (1 - OVERDUE_SHARE) * batch_s)
    done = np.minimum(reported_batches + unreported_batches, planned)
    offset_s = np.maximum(0.0, began_at - origin)
    workers = [member.source.worker for member in members]
    return origin, FleetProgress(workers, planned, done, batch_s, sizes, offset_s, np.sqrt(variance), is_idle)


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
    """Number of further batches that a worker does even if its plan becomes shorter."""
    closed: npt.NDArray[np.bool_]
    """Whether its plan is kept."""
    finish_s: Floats
    """Time at which its present plan is expected to end; 0 if it is idle."""
    offset_s: Floats
    """Time at which the batches after the certain ones begin."""


def correct(
    fleet: FleetProgress, planned_samples: int, missing_samples: int, now_s: float, equal_batches: bool
) -> CorrectedAllocation:
    """Plan anew for the workers of a round that haven't delivered.

    Args:
        fleet: expected progress of these workers.
        planned_samples: number of samples in their present plans.
        missing_samples: number of samples of the round's target that aren't delivered.
        now_s: present time, in seconds from the origin of the paces.
        equal_batches: whether all workers get equally many batches; then batch times are taken as exact.

    """
    misses_target = planned_samples < missing_samples
    remainder = _exact(fleet) if equal_batches else _remainder(fleet, now_s, misses_target)
    kept_batches = fleet.done + remainder.certain
    missing_samples -= int(kept_batches @ fleet.sizes)
    shared_finish_s, further_batches = _shared_out(fleet, remainder, max(0, missing_samples))
    certain_ends_s = remainder.offset_s[remainder.certain > 0]
    finish_s = float(certain_ends_s.max(initial=max(now_s, shared_finish_s)))
    return CorrectedAllocation(kept_batches + further_batches, finish_s, float(remainder.finish_s.max()), misses_target)


def _shared_out(fleet: FleetProgress, remainder: _Remainder, missing_samples: int) -> tuple[float, Counts]:
    """Time at which the missing samples are delivered, and further batches of each worker whose plan isn't kept."""
    further_batches = np.zeros_like(fleet.done)
    rows = np.flatnonzero(~remainder.closed)
    if not len(rows):
        return 0.0, further_batches
    workers = [fleet.workers[row] for row in rows.tolist()]
    columns = fleet.batch_s[rows], fleet.sizes[rows], remainder.offset_s[rows]
    finish_s, further_batches[rows], _ = plan_columns(workers, *columns, missing_samples)
    return finish_s, further_batches


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
