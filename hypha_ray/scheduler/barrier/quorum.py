"""Quorum of a round: the number of deltas that it needs, and its wait for the others.

With ``auto`` it is chosen by the last rounds. Each of them is closed anew by every candidate, from the times at which
its deltas came or were expected. The quorum with the least time for a committed sample wins::

    Σ (time until the round closes + time from there to the next round)  ÷  Σ samples that have arrived by then

A late delta's samples are trained again. So a quorum that drops deltas has to be better than the wait for all of them
by `LEAST_GAIN`. A worker that is lost in a round counts as one that delivers nothing at the time of its loss: the risk
of a loss within a round is in these sums as often as it occurred.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from hypha_ray.config.schema import Sync
from hypha_ray.scheduler.barrier.round import BarrierRound, RoundQuorum

KNOWN_ROUNDS = 16
"""Number of last rounds that a quorum is chosen by."""
LEAST_ROUNDS = 3
"""Number of rounds that wait for all deltas before the first choice."""
LARGEST_PART = 0.25
"""Largest part of the deltas without which a round may be closed."""
LEAST_GAIN = 0.01
"""Relative gain in time for a sample from which deltas are dropped."""
ROUNDING = 1e-9
"""Relative difference of times that are taken as equal; of equal quorums the largest is chosen."""
WAITS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Quantiles of the late deltas' delays that are tried as the grace time."""


@dataclass(frozen=True, slots=True)
class _Arrivals:
    """Arrivals of a round's deltas, in order of time."""

    times_s: tuple[float, ...]
    """Seconds from the beginning of the round; those of losses are among them."""
    samples: tuple[int, ...]
    """Samples of all deltas up to each arrival."""
    exchange_s: float
    """Seconds from the round's end to the beginning of the next one."""

    def quorum_at(self, without: int) -> float:
        """Time at which all but so many deltas are there, or the first one."""
        return self.times_s[max(0, len(self.times_s) - 1 - without)]

    def closed(self, without: int, grace_s: float) -> tuple[float, int]:
        """Time at which the round closes without up to so many deltas, and the samples that are there by then."""
        closes_s = min(self.times_s[-1], self.quorum_at(without) + grace_s)
        return closes_s, self.samples[bisect_right(self.times_s, closes_s) - 1]


class QuorumPlanner:
    """Gives each round its quorum: the job's, or one that earlier rounds speak for.

    Args:
        sync: the job's exchange.

    """

    def __init__(self, sync: Sync) -> None:
        self._sync = sync
        self.adapts = "auto" in (sync.quorum, sync.grace_s) and sync.quorum is not None
        """Whether the quorum, or its wait, is chosen by earlier rounds."""
        self._rounds: deque[_Arrivals] = deque(maxlen=KNOWN_ROUNDS)

    def observe(self, closed: BarrierRound, next_at: float) -> None:
        """Take in the arrivals of a round after which another one begins at `next_at`."""
        if not self.adapts or not closed.deltas or closed.number == 0:  # The first round warms up caches.
            return
        arrivals = [(at, closed.deltas[worker].samples) for worker, at in closed.delivered_at.items()]
        arrivals += closed.late
        arrivals += [(at, 0) for at in closed.lost_at]
        arrivals.sort()
        times_s = tuple(at - closed.started_at for at, _ in arrivals)
        samples = tuple(accumulate(samples for _, samples in arrivals))
        self._rounds.append(_Arrivals(times_s, samples, max(0.0, next_at - closed.closed_at)))

    def choose(self, workers: int) -> RoundQuorum:
        """Quorum of a round of so many workers."""
        quorum = self._sync.quorum
        grace_s = self._sync.grace_s
        if quorum != "auto" and grace_s != "auto":
            return RoundQuorum(quorum, grace_s)
        if quorum is None or len(self._rounds) < LEAST_ROUNDS:
            return RoundQuorum()
        best_s = (1 - LEAST_GAIN) * self._sample_s(0, 0.0)
        best = RoundQuorum()
        for without in self._absences(workers):
            for wait_s in self._waits(without):
                sample_s = self._sample_s(without, wait_s)
                if sample_s < (1 - ROUNDING) * best_s:
                    best_s = sample_s
                    best = RoundQuorum(max(1, workers - without), wait_s)
        return best

    def _absences(self, workers: int) -> Iterator[int]:
        """Numbers of deltas that may be missing: the job's, or 1, 2, 4 … up to a part of the workers."""
        if isinstance(self._sync.quorum, int):
            yield max(0, workers - self._sync.quorum)
            return
        without = 1
        while without <= LARGEST_PART * workers:
            yield without
            without *= 2

    def _waits(self, without: int) -> list[float]:
        """Grace times to be tried: the job's, or none and quantiles of late deltas' times after the quorum."""
        if self._sync.grace_s != "auto":
            return [self._sync.grace_s]
        delays_s = [0.0]
        for arrivals in self._rounds:
            quorum_s = arrivals.quorum_at(without)
            first_late = max(1, len(arrivals.times_s) - without)
            delays_s += [time_s - quorum_s for time_s in arrivals.times_s[first_late:]]
        delays_s.sort()
        last = len(delays_s) - 1
        return sorted({delays_s[round(quantile * last)] for quantile in WAITS})

    def _sample_s(self, without: int, grace_s: float) -> float:
        """Seconds for each sample that arrives in time, over the known rounds."""
        exchange_s = median(arrivals.exchange_s for arrivals in self._rounds)
        seconds = 0.0
        samples = 0
        for arrivals in self._rounds:
            closes_s, in_time = arrivals.closed(without, grace_s)
            seconds += closes_s + exchange_s
            samples += in_time
        return seconds / max(1, samples)
