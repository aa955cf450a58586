"""Sizes of rounds, which grow until exchanges take at most `rounds.max_exchange_share` of the fleet's time.

An exchange takes as long whatever the round's samples are, while all other time grows with them. So a part `s` of the
time falls to the limit `L` in rounds with ``s (1 − L) / (L (1 − s))`` times as many samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypha_ray.config import Job
from hypha_ray.fleet_time import FleetTime

LARGEST_STEP = 2.0
"""Largest factor by which rounds grow at once."""
MOST = 16
"""Largest number of samples of a round, in multiples of `rounds.samples_between_updates`."""
STATE = "round_growth"
"""Key of the state in a commit."""


class RoundSizes:
    """Samples of the rounds to come.

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
