"""What is done to each block of memory: in one pass that numba compiles, or by torch where there is no numba.

The results agree to the bit. Only norms may differ in their last digits, because sums are taken in another order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from hypha_ray.server.gates import SMALL, square_sum

compiled: Any
try:
    from hypha_ray.server import compiled
except (ImportError, RuntimeError):  # The latter where numba finds no folder to keep what it compiles.
    compiled = None


class Move(NamedTuple):
    """A block of Nesterov's step: what is read, and where results go."""

    mean: torch.Tensor
    """Of the workers' weights."""
    theta: torch.Tensor
    velocity: torch.Tensor
    new: torch.Tensor
    new_velocity: torch.Tensor


def square_distance(one: torch.Tensor, other: torch.Tensor, room: torch.Tensor) -> float:
    """Squared L2 norm of a difference, as `square_sum` takes it; there must be room for the difference."""
    if _fits(one):
        total = float(compiled.square_distance(one.numpy(), other.numpy()))
        if SMALL < total < math.inf:
            return total
    return square_sum(torch.sub(one, other, out=room))


def lerp(start: torch.Tensor, end: torch.Tensor, weight: float, out: torch.Tensor) -> torch.Tensor:
    """`torch.lerp`, for weights from ½ on."""
    if not _fits(out):
        return torch.lerp(start, end, weight, out=out)
    compiled.blend(start.numpy(), end.numpy(), np.float32(weight) - np.float32(1), out.numpy())
    return out


def nesterov(eta: float, mu: float, move: Move, room: torch.Tensor) -> float | None:
    """Nesterov's v ← μv + Δ̄; θ ← θ + η(μv + Δ̄) in one pass, with Δ̄ the mean of weights without θ.

    Returns:
        The squared norm of θ's change; None: not without numba, and nothing is written.

    """
    if not _fits(move.theta):
        return None
    mean, theta, velocity, new, new_velocity = (tensor.numpy() for tensor in move)
    total = float(compiled.nesterov(mean, theta, velocity, eta, mu, new, new_velocity))
    return total if SMALL < total < math.inf else square_distance(move.new, move.theta, room)


def _fits(tensor: torch.Tensor) -> bool:
    return compiled is not None and tensor.dtype == torch.float32
