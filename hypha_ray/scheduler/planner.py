"""Number of batches of each worker in a round, so that all finish together and early; and limits of pace.

A worker's n-th further batch is delivered at ``offset_s + n · batch_s``, evaluated in float64. The plan is
exact with respect to that expression, so no rounding decides between two plans.

Times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import HyphaError
from hypha_ray.exchange_schedule import SMALL_FLEET
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.types.data import record

Counts: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

SECONDS = (1e-9, 1e9)
"""Allowed batch times. Within these limits, numbers of batches and sums of samples are exact in float64 and int64."""
MAX_BATCH_SIZE = 10**9
MAX_TARGET = 10**15

RELAXATION_MARGIN = 1e-9
"""Margin far above the rounding error of a sum over a fleet, and far below a batch."""
LONGEST_S = 10.0
"""Longest interval in seconds, for ten thousand workers and more."""
CHECK_S = 1.0
"""Seconds between two checks for silent workers and empty slots."""
CHECKED_PER_S = 2000
"""Workers that are checked in a second of a large fleet."""
LEASE_CHECKS = 100
"""Checks in the time of a long lease."""
MAX_ROUNDS_AHEAD = 4
"""Most rounds in progress or not yet stored: each holds weights and momentum in memory."""
LONG_WAIT_S = 10.0
"""Seconds that a round waits for the store before a problem is reported."""


class PlannerInputError(HyphaError):
    """Figures that no plan can be made of."""


@record(frozen=True, slots=True)
class Pace:
    """Speed of a worker: its n-th further batch of the round is delivered at ``offset_s + n · batch_s``.

    `offset_s` is the time before its first batch and that of the upload.
    """

    worker: int
    batch_s: float
    batch_size: int
    offset_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Allocation:
    """Batches of every worker, zeros included; time of the last delivery; and samples of all batches."""

    finish_s: float
    batches: dict[int, int]
    samples: int


def plan(fleet: Sequence[Pace], target: int) -> Allocation:
    """Share out `target` samples: T* = min T with Σ batch_size·⌊(T − offset_s) / batch_s⌋ ≥ target.

    Batches are taken in the order of their finish, equal ones in the order of workers, until the target is reached. So
    the overshoot is less than the last batch. O(W log W) for any target.

    Raises:
        PlannerInputError: no worker, a worker twice, or a figure outside its range.

    """
    ordered = sorted(fleet, key=attrgetter("worker"))
    workers = [pace.worker for pace in ordered]
    if len(set(workers)) < len(workers):
        repeated_worker = next(worker for worker, following in pairwise(workers) if worker == following)
        raise PlannerInputError("PLN002", f"worker {repeated_worker} is in the fleet twice")
    rows = np.array([(pace.batch_s, pace.batch_size, pace.offset_s) for pace in ordered], dtype=np.float64)
    batch_s, sizes, offset_s = rows.reshape(-1, 3).T
    finish_s, batches, samples = plan_columns(workers, batch_s, sizes, offset_s, target)
    return Allocation(finish_s, dict(zip(workers, batches.tolist(), strict=True)), samples)


def plan_columns(
    workers: Sequence[int], batch_s: Floats, sizes: Floats | Counts, offset_s: Floats, target: int
) -> tuple[float, Counts, int]:
    """Share out samples as `plan` does; return the figures of its `Allocation`, batches as a column.

    Args:
        workers: different workers, in the order of their numbers.
        batch_s: `Pace.batch_s` of each.
        sizes: `Pace.batch_size` of each.
        offset_s: `Pace.offset_s` of each.
        target: number of samples.

    Raises:
        PlannerInputError: no worker, or a figure outside its range.

    """
    table = _Table(workers, batch_s, sizes, offset_s)
    if _checked_target(target) <= 0:
        return 0.0, np.zeros(len(workers), np.int64), 0
    low, high = table.bracket(target)
    steps = high - low
    rows = np.repeat(np.arange(len(steps)), steps)
    nth = low[rows] + 1 + np.arange(len(rows)) - (np.cumsum(steps) - steps)[rows]
    finish = table.offset_s[rows] + nth * table.batch_s[rows]
    order = np.argsort(finish, kind="stable")
    samples = low @ table.sizes + np.cumsum(table.sizes[rows[order]])
    last_row = int(np.searchsorted(samples, target))
    batches = low + np.bincount(rows[order[: last_row + 1]], minlength=len(low))
    return float(finish[order[last_row]]), batches, int(samples[last_row])


class _Table:
    """A fleet as columns, in the order of worker numbers."""

    def __init__(self, workers: Sequence[int], batch_s: Floats, sizes: Floats | Counts, offset_s: Floats) -> None:
        if not workers:
            raise PlannerInputError("PLN001", "there is no worker to plan for", fix="wait until a worker has joined")
        self.workers = workers
        self.batch_s = self._checked("batch_s", batch_s, *SECONDS)
        self.offset_s = self._checked("offset_s", offset_s, 0.0, SECONDS[1])
        self.sizes = self._checked("batch_size", sizes, 1, MAX_BATCH_SIZE, is_whole=True).astype(np.int64)

    def _checked(
        self, name: str, figures: Floats | Counts, least: float, most: float, is_whole: bool = False
    ) -> Floats:
        column = figures.astype(np.float64)
        is_allowed = (column >= least) & (column <= most)
        if is_whole:
            is_allowed &= column == np.floor(column)
        if not is_allowed.all():
            row = int(np.argmin(is_allowed))
            allowed_kind = "a whole number from" if is_whole else "from"
            problem = f"{name} of worker {self.workers[row]} can't be planned with"
            raise PlannerInputError("PLN002", problem, str(column[row]), f"{allowed_kind} {least:g} to {most:g}")
        return column

    def finish_s(self, batches: Counts) -> Floats:
        """Time at which each worker has delivered that many batches."""
        return self.offset_s + batches * self.batch_s

    def delivered(self, time_s: float) -> Counts:
        """Number of batches that each worker has delivered by then."""
        quotients = np.floor((time_s - self.offset_s) / self.batch_s)
        count = np.maximum(quotients, 0).astype(np.int64)
        # The division is rounded: make it agree with `finish_s`. Nearly always neither loop is entered twice.
        while (over := (self.finish_s(count) > time_s) & (count > 0)).any():
            count -= over
        while (under := self.finish_s(count + 1) <= time_s).any():
            count += under
        return count

    def bracket(self, target: int) -> tuple[Counts, Counts]:
        """Batches at two times, one before T* and one not, with few batches between them.

        If batches were divisible, the first k workers would reach the target at
        ``(target + Σ rate·offset) / Σ rate``, and the fleet at the least of these over k. It is a lower bound of T*.
        Undivided batches lag by less than one batch each, so that of target + Σ batch_size is an upper bound.
        """
        order = np.argsort(self.offset_s)
        rate = (self.sizes / self.batch_s)[order]
        starts = np.cumsum(rate * self.offset_s[order])
        rates = np.cumsum(rate)
        largest = target + int(self.sizes.sum())
        low_s = float(np.min((target + starts) / rates)) * (1 - RELAXATION_MARGIN)
        high_s = float(np.min((largest + starts) / rates)) * (1 + RELAXATION_MARGIN)
        low = self.delivered(low_s)
        high = self.delivered(high_s)
        while (high - low).sum() > 64 + 2 * len(low):
            middle_s = (low_s + high_s) / 2
            if not low_s < middle_s < high_s:
                break
            middle = self.delivered(middle_s)
            if middle @ self.sizes < target:
                low_s = middle_s
                low = middle
            else:
                high_s = middle_s
                high = middle
        return low, high


def _checked_target(target: int) -> int:
    if isinstance(target, bool) or not isinstance(target, int) or target > MAX_TARGET:
        allowed = f"a whole number up to {MAX_TARGET:g}"
        raise PlannerInputError("PLN003", "the target can't be planned for", repr(target), allowed)
    return target


def check_interval_s(workers: int, lease_s: float = 0.0) -> float:
    """Seconds between two checks of so many workers; below the third of the shortest lease in any fleet."""
    return max(CHECK_S, workers / CHECKED_PER_S, lease_s / LEASE_CHECKS)


class CorrectionPace:
    """Allows corrections at once in a small fleet of at most so many workers, and at intervals in a large one."""

    def __init__(self, workers: int) -> None:
        self._every_s = 0.0 if workers <= SMALL_FLEET else min(LONGEST_S, workers / 1000)
        self._last_at = self._urgent_at = -math.inf
        self.overdue = False
        """Whether a correction was deferred."""

    def allows(self, now: float, urgent: bool = False) -> bool:
        """Whether plans may be corrected now; otherwise the correction becomes overdue.

        An urgent correction, as after a loss, keeps the interval only to the urgent one before it.
        """
        previous_at = self._urgent_at if urgent else self._last_at
        self.overdue = now < previous_at + self._every_s
        if not self.overdue:
            self._last_at = now
            if urgent:
                self._urgent_at = now
        return not self.overdue

    def hurry(self) -> None:
        """Allow the next correction at once."""
        self._last_at = -math.inf


class StorePace:
    """Counts the rounds that the store has written, earlier ones included."""

    def __init__(self, written_rounds: int, out: Outbox) -> None:
        self._written = written_rounds
        self._out = out
        self._waiting_since: float | None = None
        """Time at which a round began to wait; None if none waits, infinity once the wait is reported."""

    def wrote(self, round: int) -> None:
        """Count a round as stored."""
        self._written = max(self._written, round + 1)

    def holds(self, round: int, now: float) -> bool:
        """Return True if a round has to wait before it begins; report a long wait once."""
        if round - self._written < MAX_ROUNDS_AHEAD:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since >= LONG_WAIT_S:
            self._waiting_since = math.inf
            behind_text = f"{MAX_ROUNDS_AHEAD} rounds behind"
            self._out.problem(f"training waits for the store, which is {behind_text}: is the disk slow?", now)
        return True
