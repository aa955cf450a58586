"""Result of training on one batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.types import Sums


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a batch, whose tensors are on the device and aren't waited for."""

    loss: torch.Tensor
    """Mean loss over the scored positions."""
    scored: int
    """Number of scored positions; with 0 the batch has changed nothing."""
    norm: torch.Tensor
    """L2 norm of the gradients before clipping."""
    tokens: int | None = None
    """Number of tokens without padding; None for data without tokens."""
    sums: Sums = field(default_factory=dict)
    """Further figures of the batch."""
    bad: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """Keys, as `Samples.keys`, of samples that were left out because loss or gradient weren't finite."""
    shown: tuple[Mapping[str, Any], ...] = ()
    """Records of a few responses, for people to read."""
    revived: tuple[int, ...] = ()
    """Numbers of the model workers that have died and were replaced since the batch before."""
    problems: tuple[str, ...] = ()
    """Lines for the user about what failed beside the training, which went on."""
