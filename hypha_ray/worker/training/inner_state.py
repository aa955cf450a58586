"""Inner state that a worker leaves to its successor, for runs that repeat to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hypha_ray.codec import Encoder
from hypha_ray.types import Flat
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
