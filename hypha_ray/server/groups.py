"""A group of parameters that an outer optimizer steps on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Group(NamedTuple):
    """A group of parameters: θ and state, which are never written to, and the arrays for new ones."""

    theta: torch.Tensor
    state: Sequence[torch.Tensor]
    new_theta: torch.Tensor
    new_state: Sequence[torch.Tensor]
    relative: bool
    """Whether the mean is one of deltas instead of weights."""
