"""Protocols between the inner loop and kinds of training, and the functions that choose: trainers and strategies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from hypha_ray.config import Job
from hypha_ray.model.flat import Array, Groups
from hypha_ray.model.loading.tokenizer import PackedTokenizer
from hypha_ray.model.task import SpecialTokens
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import FinishedStep, PendingStep, Step
from hypha_ray.types import Flat, Layout, Samples, Sums
from hypha_ray.types.layout import is_trained
from hypha_ray.worker.training.supervised import SupervisedTrainer


class Trainer(Protocol):
    """A model and its inner optimizer on one device: the steps of a worker, in Ray or outside of it."""

    model: torch.nn.Module
    """All that is trained and exchanged, as `build_trained` gives it."""
    optimizer: Inner
    device: torch.device

    @property
    def parameters(self) -> int:
        """Number of parameters that are reported to the user."""

    def check_loss(self, batch: Samples) -> None:
        """Refuse a model that can't be trained on such samples."""

    def seed(self, *entropy: int) -> None:
        """Seed all random number generators."""

    def announce(self, upcoming: Iterator[Samples]) -> None:
        """Learn which batches of the round probably come after the next one, as far as wanted."""

    def begin_step(self, batch: Samples) -> PendingStep:
        """Begin one inner step; its result may be known only after later ones have begun."""

    def backward(self, batch: Samples, summed: bool = False) -> Step:
        """Add a batch's gradient, of the mean over scored positions or of their sum."""

    def evaluate(self, batches: Iterable[Samples]) -> Sums:
        """Return figures of the model over validation samples, by the names of records."""

    def merged(self, version: int) -> None:
        """Learn that global weights of this version were merged into the model."""

    def gather(self, layout: Layout, fragment: int, out: Flat | None = None, gradients: bool = False) -> Flat:
        """Copy a fragment out of the model, as `model.layout.gather`."""

    def scatter(self, layout: Layout, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment's arrays into the model, as `model.layout.scatter`."""

    def optimizer_state(self) -> Flat:
        """Copy the optimizer's state, as `optim.state.export_state`."""

    def load_optimizer_state(self, state: Mapping[str, Array]) -> None:
        """Continue with a state that `optimizer_state` returned."""

    def state(self) -> Flat:
        """Return the state that a successor needs beside weights and the optimizer's state."""

    def restore(self, state: Flat) -> None:
        """Continue with a state that `state` returned."""

    def close(self) -> None:
        """Release all resources but memory, such as processes."""


def trainer_of(job: Job, worker: int, specials: SpecialTokens | None = None, processes: int = 1) -> Trainer:
    """Build the trainer that a job asks for.

    Args:
        job: the job file.
        worker: number of the worker.
        specials: special tokens for a masked language model, the whole tokenizer for reinforcement learning; None: the
            tokenizer that the job names, if any.
        processes: number of processes of the worker, which has them in Ray only.

    Raises:
        HyphaError: the model can't be built, or can't be trained as the job wants it.

    """
    if job.rl.algorithm is None:
        if processes == 1:
            return SupervisedTrainer(job, specials)
        from hypha_ray.worker.group.actor import group_trainer  # Ray has no part in a worker of one process.

        return group_trainer(job, specials, worker)
    from hypha_ray.rl.island import Island

    assert isinstance(specials, PackedTokenizer)  # The driver sends it with every job of reinforcement learning.
    return Island(job, specials.load(), worker)


class Strategy(Protocol):
    """The part of a worker in which strategies differ."""

    has_state: bool
    """Whether a successor needs the optimizer's state to continue."""

    def begin(self) -> None:
        """A round begins."""

    def begin_step(self, batch: Samples) -> PendingStep:
        """Begin to train on a batch; its result may be known only after later ones have begun."""

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """Arrays of a fragment's payload, as `gather` gives them."""


class LocalSteps:
    """DiLoCo: a step of the worker's own optimizer a batch; the result is its weights."""

    has_state = True

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def begin(self) -> None:
        """Begin a round; the optimizer's state is kept."""

    def begin_step(self, batch: Samples) -> PendingStep:
        """Begin one step; the norm is that of its gradient, before clipping."""
        return self._trainer.begin_step(batch)

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """The weights, and the buffers."""
        return self._trainer.gather(layout, fragment, out)


class MeanGradient:
    """Synchronous training: the model stays as it is, and the result is the mean gradient over the scored positions.

    So padding counts nothing, and the mean over all workers, weighted by their scored positions, is the gradient of
    all batches joined.
    """

    has_state = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._scored = 0

    def begin(self) -> None:
        """Forget the gradients of the last round."""
        self._trainer.optimizer.zero_grad()
        self._scored = 0

    def begin_step(self, batch: Samples) -> PendingStep:
        """Add a batch's gradient, finished, as a sum can't be undone later; the norm is that of the mean so far."""
        result = self._trainer.backward(batch, summed=True)
        self._scored += result.scored
        norm = result.norm / max(1, self._scored)
        return FinishedStep(replace(result, norm=norm))

    def result(self, layout: Layout, fragment: int, out: Flat | None = None) -> Flat:
        """Copy the mean gradient in the place of the parameters, zeros for those without one; and the buffers."""
        flat = self._trainer.gather(layout, fragment, out, gradients=True)
        for group, array in flat.items():
            if is_trained(group):
                torch.from_numpy(array).div_(max(1, self._scored))
        return flat


def strategy(job: Job, trainer: Trainer) -> Strategy:
    """The strategy that a job file names."""
    return MeanGradient(trainer) if job.sync.traits.sends_gradients else LocalSteps(trainer)
