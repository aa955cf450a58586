"""Optimizer of a policy and a critic, which have settings of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hypha_ray.config import Job
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.optim.optimizers import Inner


class Joint(Inner):
    """Inner optimizers of several modules as one; each clips the gradients of its own module."""

    def __init__(self, parts: Sequence[Inner]) -> None:
        self._parts = parts
        self.optimizers = []
        self.parameters = []
        for part in parts:
            self.optimizers += part.optimizers
            self.parameters += part.parameters

    def seek(self, position: float) -> None:
        """Set the position in all schedules."""
        for part in self._parts:
            part.seek(position)

    def scale(self, factor: float) -> None:
        """Make the next step with all peak learning rates times this factor."""
        for part in self._parts:
            part.scale(factor)

    def ramp(self, steps: int) -> None:
        """Warm all parts up to their scheduled learning rates."""
        for part in self._parts:
            part.ramp(steps)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the first part's next step."""
        return self._parts[0].learning_rate

    def step(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> None:
        """Take a step of each part; the norm of all gradients isn't used."""
        for part in self._parts:
            part.step(skipped=skipped)


def critic_settings(job: Job) -> InnerOptimizer:
    """Return the settings of a critic's optimizer."""
    rate = job.rl.critic.learning_rate
    if rate is None:
        return job.inner_optimizer
    return job.inner_optimizer.model_copy(update={"learning_rate": rate})
