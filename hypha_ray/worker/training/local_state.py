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
from hypha_ray.worker.inbox import Arrived
from hypha_ray.worker.training.trainer import Trainer

_LEFT_OUT = "left-out/"
_TRAINER = "trainer/"


def export_inner_state(trainer: Trainer, encoders: Sequence[Encoder]) -> Flat:
    """State of the optimizer, under ``trainer/`` the trainer's own, and under ``left-out/fragment/group`` residuals."""
    residuals = enumerate(one.residual for one in encoders)
    left_out = {f"{_LEFT_OUT}{n}/{group}": array.copy() for n, one in residuals for group, array in one.items()}
    own = {_TRAINER + name: array for name, array in trainer.state().items()}
    return trainer.optimizer_state() | own | left_out


def import_inner_state(trainer: Trainer, encoders: Sequence[Encoder], state: Flat) -> None:
    """Go on from what `export_inner_state` gave; the arrays are copied.

    Raises:
        CheckpointError: as `load_state`.

    """
    own = _part(state, _TRAINER)
    left_out = _part(state, _LEFT_OUT)
    trainer.load_optimizer_state({n: array for n, array in state.items() if not n.startswith((_TRAINER, _LEFT_OUT))})
    trainer.restore(own)
    for name, array in left_out.items():
        fragment, group = name.split("/", 1)
        encoders[int(fragment)].residual[group] = np.array(array)


def _part(state: Flat, prefix: str) -> Flat:
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}


_NARROW = frozenset({"bfloat16", "float16"})


class LocalWeights:
    """The weights that a worker trains.

    Global weights are of 32 bits. A model of 16 begins with them rounded, and what it hands over is what they were and
    what it has learned: rounding is no delta.

    Args:
        trainer: trainer of the model that holds them.
        layout: where its tensors lie in flat arrays.
        mixing: part α of its own weights that is kept in w ← θ + α(w − θ), where new θ comes for a part of them.
        keeps: whether `theta` will be asked for.

    """

    def __init__(self, trainer: Trainer, layout: Layout, mixing: float, keeps: bool) -> None:
        self._trainer = trainer
        self._layout = layout
        self._mixing = mixing
        self._keeps = keeps
        load_ahead("copy", max((entry.size for entry in layout.entries), default=0))
        self.theta: dict[int, Flat] = {}
        """Newest global weights by fragment, as they came."""
        self._own = False
        """Whether the live weights differ from the global ones."""
        self._narrow = any(entry.dtype in _NARROW for entry in layout.entries)
        self._rest: dict[int, Flat] = {}
        """Rounding error of 16-bit weights when they were last written, by fragment."""

    def merge(self, arrived: Arrived, mixes: bool = True) -> bool:
        """Take new global weights θ over: all there are, or new ones, which are mixed if so (arXiv 2501.18512).

        Mixed, the live weights become θ + α(w − θ).

        Returns:
            Whether they were mixed.

        """
        mixing = self._mixing if mixes and not arrived.whole else 0.0
        for fragment, flat in arrived.fragments.items():
            if mixing and self._narrow:
                self._write(fragment, self._mixed(fragment, flat, mixing))
            else:
                self._write(fragment, flat, mixing)
        self._own = (self._own and len(arrived.fragments) < self._layout.fragments) or mixing > 0
        if self._keeps:
            self.theta |= arrived.fragments
        return mixing > 0

    def _mixed(self, fragment: int, theta: Groups, mixing: float) -> Groups:
        """Global weights mixed with a worker's own in 32 bits: θ + α(w − θ)."""
        own: Groups = self.complete(fragment, self._trainer.gather(self._layout, fragment))
        trained = {group: own[group] - theta[group] for group in theta if is_trained(group)}
        return {**theta, **{group: theta[group] + mixing * change for group, change in trained.items()}}

    def _write(self, fragment: int, flat: Groups, mixing: float = 0.0) -> None:
        """Copy a fragment into the model, and keep what 16-bit weights can't hold of it."""
        self._trainer.scatter(self._layout, fragment, flat, mixing)
        if self._narrow:
            held = self._trainer.gather(self._layout, fragment, self._rest.get(fragment))
            for group in filter(_is_float, held):
                np.subtract(flat[group], held[group], out=held[group])
            self._rest[fragment] = held

    def complete(self, fragment: int, own: Flat) -> Flat:
        """Add, in place, the rounding error of a fragment's weights, so that it doesn't count as a change."""
        for group, rest in self._rest.get(fragment, {}).items():
            if _is_float(group):
                np.add(own[group], rest, out=own[group])
        return own

    def mark_changed(self) -> None:
        """Note that a step is about to change the live weights."""
        self._own = True

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Context with the global weights in the model."""
        if not self._own:
            yield
            return
        fragments = range(self._layout.fragments)
        own = [self._trainer.gather(self._layout, fragment) for fragment in fragments]
        for fragment in fragments:
            self._trainer.scatter(self._layout, fragment, self.theta[fragment])
        try:
            yield
        finally:
            for fragment in fragments:
                self._trainer.scatter(self._layout, fragment, own[fragment])


def _is_float(group: str) -> bool:
    return group.endswith("/float32")
