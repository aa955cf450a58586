"""What a worker does with its batches, and what it hands over after them: one class for each strategy."""

from __future__ import annotations

from typing import Protocol

import torch

from hypha_ray.config import Job
from hypha_ray.groups import is_trained
from hypha_ray.model.layout import gather
from hypha_ray.types import Flat, Layout
from hypha_ray.worker.feeder import Arrays
from hypha_ray.worker.stepper import Stepper


class Strategy(Protocol):
    """The part of a worker in which strategies differ."""

    has_state: bool
    """A successor needs the optimizer's state to go on from where this worker is."""

    def begin(self) -> None:
        """A round begins."""
        ...

    def train(self, batch: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a batch in; its mean loss, and a gradient norm. No wait for the device."""
        ...

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """What a fragment's payload is made of, as `gather` gives it."""
        ...


class LocalSteps:
    """DiLoCo: a step of the worker's own optimizer a batch; the result is its weights.

    Args:
        stepper: model and optimizer.

    """

    has_state = True

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    def begin(self) -> None:
        """Nothing of the last round is left but the optimizer's state, which stays."""

    def train(self, batch: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step; the norm is that of its gradient, before clipping."""
        return self._stepper.step(batch)

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """The weights, and the buffers."""
        return gather(self._stepper.model, layout, fragment, out)


class MeanGradient:
    """Synchronous training: the model stays as it is, and the result is the mean gradient over the round's samples.

    Args:
        stepper: model and optimizer, of which only the rates are used.

    """

    has_state = False

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._samples = 0

    def begin(self) -> None:
        """Forget the gradients of the last round."""
        self._stepper.optimizer.zero_grad()
        self._samples = 0

    def train(self, batch: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a batch's gradient; the norm is that of the mean so far."""
        size = len(next(iter(batch.values())))
        loss = self._stepper.backward(batch, size)
        self._samples += size
        return loss, torch.nn.utils.get_total_norm(self._stepper.gradients) / self._samples

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """The mean gradient in the place of the parameters, zeros where there is none; and the buffers."""
        flat = gather(self._stepper.model, layout, fragment, out, gradients=True)
        for group, array in flat.items():
            if is_trained(group):
                torch.from_numpy(array).div_(max(1, self._samples))
        return flat


def strategy(job: Job, stepper: Stepper) -> Strategy:
    """The strategy that a job file names."""
    return MeanGradient(stepper) if job.sync.strategy == "sync" else LocalSteps(stepper)
