"""Trainers and strategies as the inner loop knows them, the weights that they train, and state for a successor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from hypha_ray.codec import Encoder
from hypha_ray.config import Job
from hypha_ray.kernels import load_ahead
from hypha_ray.model.flat import Array, Groups
from hypha_ray.model.task import SpecialTokens
from hypha_ray.model.tokenizers import PackedTokenizer
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.step import FinishedStep, PendingStep, Step
from hypha_ray.types import Flat, Layout, Samples, Sums
from hypha_ray.types.data import is_trained
from hypha_ray.worker.incarnation import NewWeights
from hypha_ray.worker.supervised import SupervisedTrainer

_RESIDUALS = "left-out/"
_TRAINER = "trainer/"
_16_BIT = frozenset({"bfloat16", "float16"})


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

    def announce(self, upcoming_batches: Iterator[Samples]) -> None:
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
        """Copy the optimizer's state, as `optim.step.export_state`."""

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


def export_inner_state(trainer: Trainer, encoders: Sequence[Encoder]) -> Flat:
    """Copy the optimizer's state, the trainer's own as ``trainer/…``, and residuals as ``left-out/fragment/group``."""
    state = trainer.optimizer_state()
    for name, array in trainer.state().items():
        state[_TRAINER + name] = array
    for fragment, encoder in enumerate(encoders):
        for group, array in encoder.residual.items():
            state[f"{_RESIDUALS}{fragment}/{group}"] = array.copy()
    return state


def import_inner_state(trainer: Trainer, encoders: Sequence[Encoder], state: Flat) -> None:
    """Continue with a state that `export_inner_state` returned; the arrays are copied.

    Raises:
        CheckpointError: as `load_state`.

    """
    optimizer_state: Flat = {}
    trainer_state: Flat = {}
    residuals: Flat = {}
    for name, array in state.items():
        if name.startswith(_TRAINER):
            trainer_state[name.removeprefix(_TRAINER)] = array
        elif name.startswith(_RESIDUALS):
            residuals[name.removeprefix(_RESIDUALS)] = array
        else:
            optimizer_state[name] = array
    trainer.load_optimizer_state(optimizer_state)
    trainer.restore(trainer_state)
    for name, array in residuals.items():
        fragment, group = name.split("/", 1)
        encoders[int(fragment)].residual[group] = np.array(array)


class LocalWeights:
    """The weights that a worker trains.

    Global weights have 32 bits. A model of 16 bits begins with rounded ones. Its rounding error is added to its result,
    so that it doesn't count as a change.

    Args:
        trainer: trainer of the model.
        layout: places of the model's tensors in flat arrays.
        mixing: weight α of local weights in w ← θ + α(w − θ), if new θ of some fragments arrives.
        keeps_theta: whether `theta` is needed.

    """

    def __init__(self, trainer: Trainer, layout: Layout, mixing: float, keeps_theta: bool) -> None:
        self._trainer = trainer
        self._layout = layout
        self._mixing = mixing
        self._keeps_theta = keeps_theta
        load_ahead("copy", max((entry.size for entry in layout.entries), default=0))
        self.theta: dict[int, Flat] = {}
        """Newest global weights by fragment; empty unless they are kept."""
        self._is_local = False
        """Whether the live weights differ from the global ones."""
        self._is_16_bit = any(entry.dtype in _16_BIT for entry in layout.entries)
        self._rounding_errors: dict[int, Flat] = {}
        """Rounding error of 16-bit weights when they were last written, by fragment."""

    def merge(self, new_weights: NewWeights, mixes: bool = True) -> bool:
        """Merge new global weights θ into the live weights w.

        All fragments replace w. If only some are new, w becomes θ + α(w − θ) there if `mixes` (arXiv 2501.18512).

        Returns:
            Whether they were mixed.

        """
        mixing = 0.0
        if mixes and not new_weights.whole:
            mixing = self._mixing
        for fragment, flat in new_weights.fragments.items():
            if mixing and self._is_16_bit:
                self._write(fragment, self._mixed(fragment, flat, mixing))
            else:
                self._write(fragment, flat, mixing)
        replaces_all = len(new_weights.fragments) == self._layout.fragments
        self._is_local = mixing > 0 or (self._is_local and not replaces_all)
        if self._keeps_theta:
            self.theta |= new_weights.fragments
        return mixing > 0

    def _mixed(self, fragment: int, theta: Groups, mixing: float) -> Groups:
        """Global weights mixed with local ones in 32 bits: θ + α(w − θ)."""
        local: Groups = self.add_rounding_error(fragment, self._trainer.gather(self._layout, fragment))
        mixed_theta = dict(theta)
        for group in filter(is_trained, theta):
            change = local[group] - theta[group]
            mixed_theta[group] = theta[group] + mixing * change
        return mixed_theta

    def _write(self, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment into the model, and keep the rounding error of 16-bit weights."""
        self._trainer.scatter(self._layout, fragment, flat, mixing)
        if self._is_16_bit:
            rounded = self._trainer.gather(self._layout, fragment, self._rounding_errors.get(fragment))
            for group in filter(_is_float, rounded):
                np.subtract(flat[group], rounded[group], out=rounded[group])
            self._rounding_errors[fragment] = rounded

    def add_rounding_error(self, fragment: int, weights: Flat) -> Flat:
        """Add, in place, the rounding error of a fragment's weights, so that it doesn't count as a change."""
        for group, error in self._rounding_errors.get(fragment, {}).items():
            if _is_float(group):
                np.add(weights[group], error, out=weights[group])
        return weights

    def mark_changed(self) -> None:
        """Mark the live weights as changed by a step."""
        self._is_local = True

    @contextmanager
    def with_global_weights(self) -> Iterator[None]:
        """Context with the global weights in the model."""
        if not self._is_local:
            yield
            return
        fragments = range(self._layout.fragments)
        local = [self._trainer.gather(self._layout, fragment) for fragment in fragments]
        for fragment in fragments:
            self._trainer.scatter(self._layout, fragment, self.theta[fragment])
        try:
            yield
        finally:
            for fragment in fragments:
                self._trainer.scatter(self._layout, fragment, local[fragment])


def _is_float(group: str) -> bool:
    return group.endswith("/float32")
