"""Inner state that a worker leaves to its successor, for runs that repeat to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hypha_ray.codec import Encoder
from hypha_ray.optim.optimizers import Inner
from hypha_ray.optim.state import export_state, load_state
from hypha_ray.types import Flat

_LEFT_OUT = "left-out/"


def export_inner_state(optimizer: Inner, encoders: Sequence[Encoder]) -> Flat:
    """The optimizer's state, and under ``left-out/fragment/group`` what payloads have left out so far."""
    residuals = enumerate(one.residual for one in encoders)
    left_out = {f"{_LEFT_OUT}{n}/{group}": array.copy() for n, one in residuals for group, array in one.items()}
    return export_state(optimizer) | left_out


def import_inner_state(optimizer: Inner, encoders: Sequence[Encoder], state: Flat) -> None:
    """Go on from what `export_inner_state` gave; the arrays are copied.

    Raises:
        CheckpointError: as `load_state`.

    """
    load_state(optimizer, {name: array for name, array in state.items() if not name.startswith(_LEFT_OUT)})
    for name, array in state.items():
        if name.startswith(_LEFT_OUT):
            fragment, group = name.removeprefix(_LEFT_OUT).split("/", 1)
            encoders[int(fragment)].residual[group] = np.array(array)
