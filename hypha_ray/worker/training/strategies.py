"""The part of a worker's training in which strategies differ: one class for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from hypha_ray.config import Job
from hypha_ray.optim.pending_step import FinishedStep, PendingStep
from hypha_ray.optim.step import Step
from hypha_ray.types import Flat, Layout, Samples
from hypha_ray.types.layout import is_trained
from hypha_ray.worker.training.trainer import Trainer


class Strategy(Protocol):
    """The part of a worker in which strategies differ."""

    has_state: bool
    """A successor needs the optimizer's state to go on from where this worker is."""

    def begin(self) -> None:
        """A round begins."""
        ...

    def train(self, batch: Samples) -> Step:
        """Take a batch in."""
        ...

    def begin_step(self, batch: Samples) -> PendingStep:
        """Take a batch in, whose result may be known when later ones have been taken in."""
        ...

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """Arrays of a fragment's payload, as `gather` gives them."""
        ...


class LocalSteps:
    """DiLoCo: a step of the worker's own optimizer a batch; the result is its weights.

    Args:
        trainer: model and optimizer.

    """

    has_state = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def begin(self) -> None:
        """Begin a round; the optimizer's state is kept."""

    def train(self, batch: Samples) -> Step:
        """Take one step; the norm is that of its gradient, before clipping."""
        return self._trainer.step(batch)

    def begin_step(self, batch: Samples) -> PendingStep:
        """Begin one step, as `train`."""
        return self._trainer.begin_step(batch)

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """The weights, and the buffers."""
        return self._trainer.gather(layout, fragment, out)


class MeanGradient:
    """Synchronous training: the model stays as it is, and the result is the mean gradient over the scored positions.

    So padding counts nothing, and the mean over all workers, weighted by their scored positions, is the gradient of
    all batches joined.

    Args:
        trainer: model and optimizer, of which only the rates are used.

    """

    has_state = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._scored = 0

    def begin(self) -> None:
        """Forget the gradients of the last round."""
        self._trainer.optimizer.zero_grad()
        self._scored = 0

    def train(self, batch: Samples) -> Step:
        """Add a batch's gradient; the norm is that of the mean so far."""
        result = self._trainer.backward(batch, summed=True)
        self._scored += result.scored
        return replace(result, norm=result.norm / max(1, self._scored))

    def begin_step(self, batch: Samples) -> PendingStep:
        """Add a batch's gradient, as `train`, once it is known to be finite: sums have nothing to be left out of."""
        return FinishedStep(self.train(batch))

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """The mean gradient in the place of the parameters, zeros where there is none; and the buffers."""
        flat = self._trainer.gather(layout, fragment, out, gradients=True)
        for group, array in flat.items():
            if is_trained(group):
                torch.from_numpy(array).div_(max(1, self._scored))
        return flat


def strategy(job: Job, trainer: Trainer) -> Strategy:
    """The strategy that a job file names."""
    return MeanGradient(trainer) if job.sync.traits.sends_gradients else LocalSteps(trainer)
