"""Samples of the rounds of a run that ends when all samples of its epochs are used, with a barrier.

Each round has as many as the job says, and the last one the rest. That one exchanges all fragments, so rounds before it
leave it some samples. Lost samples are made up by the rounds that follow, or by further ones after the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hypha_ray.config import Job
from hypha_ray.scheduler.fleet.worker_state import makes_up


class RoundSamples:
    """Samples of each round that is to come.

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
