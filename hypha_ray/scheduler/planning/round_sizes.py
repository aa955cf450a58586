"""Sizes of rounds: their growth until exchanges take little of the time, and their shares of the epochs' samples."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from hypha_ray.config import Job
from hypha_ray.fleet_time import FleetTime
from hypha_ray.scheduler.fleet.worker_state import makes_up

LARGEST_STEP = 2.0
"""Largest factor by which rounds grow at once."""
MOST = 16
"""Largest number of samples of a round, in multiples of `rounds.samples_between_updates`."""
STATE = "round_growth"
"""Key of the state in a commit."""


class RoundSizes:
    """Samples of the rounds to come, which grow until exchanges take at most `rounds.max_exchange_share` of the time.

    An exchange takes as long whatever the round's samples are, while all other time grows with them. So a part `s` of
    the time falls to the limit `L` in rounds with ``s (1 − L) / (L (1 − s))`` times as many samples.

    Args:
        job: the job file.
        state: state of the last commit; empty before the first.

    """

    def __init__(self, job: Job, state: Mapping[str, Any]) -> None:
        before = state.get(STATE, {})
        self._job = job
        self._limit = job.rounds.max_exchange_share
        self._usual = job.rounds.samples_between_updates
        self.samples = max(self._usual, int(before.get("samples", 0)))
        """Samples of the next round."""
        self.exchange_share: float | None = None
        """Part of exchanges in the time of the round that was judged last; None before the first."""
        self._position = float(before.get("position", 0.0))
        """Rounds of the usual length that the planned ones amount to."""
        self._first: int | None = max(1, job.rounds.warmup_rounds)
        """First round that is judged, as the earlier ones have other samples; None: longer ones are to begin."""

    def observe(self, number: int, time: FleetTime) -> None:
        """Judge the time of a round once its record is written."""
        if self._limit is None or self._first is None or number < self._first or time.total_s <= 0:
            return
        self.exchange_share = share = time.seconds["exchange"] / time.total_s
        most = MOST * self._usual
        if share <= self._limit or self.samples >= most:
            return
        factor = LARGEST_STEP
        if share < 1:
            factor = min(factor, share * (1 - self._limit) / (self._limit * (1 - share)))
        self.samples = min(most, max(self.samples + 1, math.ceil(factor * self.samples)))
        self._first = None

    def begin(self, number: int) -> None:
        """Judge again from this round on, the first one of the new length."""
        self._first = number

    def progress(self, number: int, samples: int) -> tuple[float, float] | None:
        """Place of a planned round in the schedules, in rounds of the usual length; None: its own number says it.

        A run that ends by samples has fewer rounds if they grow.
        """
        if self._limit is None or self._job.rounds.epochs is None:
            return None
        first = self._position
        self._position += 1.0 if number < self._job.rounds.warmup_rounds else samples / self._usual
        return first, self._position

    def state(self) -> dict[str, Any]:
        """State for a later attempt; empty if rounds don't grow."""
        if self._limit is None:
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
        first: number of the first round to come.
        unused: samples that no commit has used.

    """

    def __init__(self, job: Job, first: int, unused: int) -> None:
        self._job = job
        self._last = job.rounds.update_rounds - 1
        self._makes_up = makes_up(job)
        self._least = min(job.num_workers, job.rounds.samples_between_updates)
        """Samples that each later round keeps at least."""
        self._most: int | None = None
        """Samples of a round if there are fewer than the rounds usually have, as without a damaged slice."""
        rounds = self._last + 1 - first
        before_last = self._between(first, self._last)
        if rounds > 1 and unused <= before_last:
            self._most = -(-unused // rounds)
            before_last = self._between(first, self._last)
        self._rest = min(max(1, unused - before_last), self._usual(self._last))
        """Samples of the last round."""

    def target(self, number: int, free: int) -> int:
        """Samples that a round is to have.

        Args:
            number: number of the round.
            free: samples that are neither used nor of an earlier round.

        """
        usual = self._usual(number)
        limit = free - self.reserve(number, free)
        samples = usual
        if self._makes_up:
            missing = free - self._after(number)
            samples = max(self._least, min(missing, 2 * usual))
        return max(1, min(samples, limit))

    def reserve(self, number: int, free: int) -> int:
        """Samples that a round leaves to later ones at least."""
        later_rounds = max(0, self._last - number)
        return max(0, min(later_rounds * self._least, free - self._least))

    def _after(self, number: int) -> int:
        """Samples that are to be left after a round."""
        if number >= self._last:
            return 0
        return self._between(number + 1, self._last) + self._rest

    def _between(self, first: int, stop: int) -> int:
        """Usual samples of the rounds from `first` to the one before `stop`."""
        warmup_stop = min(max(first, self._job.rounds.warmup_rounds), stop)
        samples = 0
        if warmup_stop > first:
            samples += (warmup_stop - first) * self._usual(first)
        if stop > warmup_stop:
            samples += (stop - warmup_stop) * self._usual(warmup_stop)
        return samples

    def _usual(self, number: int) -> int:
        samples = self._job.samples(number)
        return samples if self._most is None else min(samples, self._most)


def fitted(samples_by_worker: Mapping[int, int], needy: Collection[int], samples: int) -> dict[int, int]:
    """Workers' samples, cut from the last worker on until they are `samples` together.

    A worker in `needy` keeps at least one, also if there are more together then.
    """
    fitting = dict(samples_by_worker)
    excess = sum(fitting.values()) - samples
    for worker in reversed(fitting):
        if excess <= 0:
            break
        least = 1 if worker in needy else 0
        cut = min(excess, max(0, fitting[worker] - least))
        fitting[worker] -= cut
        excess -= cut
    return fitting
