"""A worker's estimate of the outer step, before the others' deltas are known.

It assumes the last mean delta, with this worker's old delta replaced by its new one
(Kale et al., Eager Updates for Overlapped Communication, arXiv 2502.12996). The outer optimizer's momentum isn't sent
to workers: it follows from the steps that they have seen.
"""

from __future__ import annotations

from typing import Any

from hypha_ray.config import Job
from hypha_ray.model.flat import Array, Groups
from hypha_ray.optim.schedules import outer_rate
from hypha_ray.types import Flat
from hypha_ray.types.layout import is_trained


class Foresight:
    """Foresees outer steps of Nesterov momentum or plain averaging.

    Args:
        job: the job file.

    """

    def __init__(self, job: Job) -> None:
        self._job, self._workers = job, job.resources.num_workers
        self._own: dict[int, dict[str, Array]] = {}
        """This worker's newest delta, by fragment."""
        self._counted: dict[int, dict[str, Array]] = {}
        """The one that is in the last step."""
        self._mean: dict[int, dict[str, Array]] = {}
        """Mean delta behind the last step."""
        self._velocity: dict[int, dict[str, Array]] = {}

    def guess(self, round: int, fragment: int, theta: Groups, result: Groups) -> Flat:
        """New weights of a fragment, if only this worker has done anything else than the last time.

        Of the others nothing is known at first; then they are expected to have done what this one has.

        Args:
            round: the round that has just been trained.
            fragment: which part of the weights.
            theta: global weights that the round started from.
            result: this worker's weights at its end.

        """
        eta, mu = self._rule(round)
        own = self._own[fragment] = {group: result[group] - theta[group] for group in theta if is_trained(group)}
        guess: Flat = dict(theta)
        for group, delta in own.items():
            mean = delta
            if fragment in self._mean:
                mean = self._mean[fragment][group] + (delta - self._counted[fragment][group]) / self._workers
            velocity = mu * self._momentum(fragment, group) + mean
            guess[group] = (theta[group] + eta * (mu * velocity + mean)).astype(theta[group].dtype)
        return guess

    def learn(self, round: int, fragment: int, before: Groups, after: Groups) -> None:
        """See what a round's step was, and conclude from it what the workers' mean delta and the momentum are.

        A step is η(μv' + Δ̄) with v' = μv + Δ̄, so Δ̄ = (step/η − μ²v) / (1 + μ).
        """
        if fragment not in self._own:
            return
        eta, mu = self._rule(round)
        own = self._counted[fragment] = self._own.pop(fragment)
        mean = {
            group: ((after[group] - before[group]) / eta - mu**2 * self._momentum(fragment, group)) / (1 + mu)
            for group in own
        }
        self._velocity[fragment] = {group: mu * self._momentum(fragment, group) + mean[group] for group in own}
        self._mean[fragment] = mean

    def forget(self) -> None:
        """Start anew: this worker has missed a step, or its delta isn't in it."""
        for known in (self._own, self._counted, self._mean, self._velocity):
            known.clear()

    def _momentum(self, fragment: int, group: str) -> Any:
        return self._velocity[fragment][group] if fragment in self._velocity else 0.0

    def _rule(self, round: int) -> tuple[float, float]:
        """Outer learning rate and momentum of a round."""
        outer = self._job.outer_optimizer
        if outer.name == "average":
            return 1.0, 0.0
        return outer_rate(outer, round, self._job.rounds.update_rounds), outer.momentum
