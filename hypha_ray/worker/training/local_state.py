"""State of a worker: its live weights and the global ones, and the inner state that it leaves to a successor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hypha_ray.codec import Encoder
from hypha_ray.kernels import load_ahead
from hypha_ray.model.flat import Groups
from hypha_ray.types import Flat, Layout
from hypha_ray.types.layout import is_trained
from hypha_ray.worker.inbox import NewWeights
from hypha_ray.worker.training.trainer import Trainer

_RESIDUALS = "left-out/"
_TRAINER = "trainer/"
_16_BIT = frozenset({"bfloat16", "float16"})


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
        mixed = dict(theta)
        for group in filter(is_trained, theta):
            change = local[group] - theta[group]
            mixed[group] = theta[group] + mixing * change
        return mixed

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
