"""DiLoCo's outer step in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hypha_ray.kernels.loading import compiled

SMALL = 1e-24
"""A sum of squares from which on fp32 loses nothing that counts."""
_NOTHING = np.empty(0, np.float32)
_Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def portions(shares: Sequence[float]) -> _Table:
    """What `torch.lerp` needs to know of values that each have such a share in the mean of those so far.

    Returns:
        Shape (values, 2): the weight that is ½ or more, of the value or else of the mean, less 1; and whether it is
        the value's.

    """
    greater = np.array([max(share, 1 - share) for share in shares], np.float32)
    forward = np.array([share >= 0.5 for share in shares], np.float32)
    return np.stack([greater - np.float32(1), forward], 1)


class Averaged(NamedTuple):
    """Weights of several workers, and what becomes of θ: 1-D fp32 tensors of equal size."""

    values: Sequence[torch.Tensor]
    portions: _Table
    """As the function of that name gives them."""
    theta: torch.Tensor
    velocity: torch.Tensor
    new: torch.Tensor | None
    """Where new θ goes; None: it isn't wanted."""
    new_velocity: torch.Tensor | None


def nesterov(eta: float, mu: float, block: Averaged) -> list[float]:
    """Take Nesterov's step v ← μv + Δ̄; θ ← θ + η(μv + Δ̄), where Δ̄ is the mean of the workers' weights without θ.

    Returns:
        Squared L2 norms: of each worker's weights without θ, and of θ's change.

    """
    numba = compiled("outer")
    assert numba is not None
    addresses = np.array([value.data_ptr() for value in block.values], np.uint64)
    squares = np.zeros(len(addresses) + 1)
    new, new_velocity = (_NOTHING if one is None else one.numpy() for one in (block.new, block.new_velocity))
    theta, velocity = block.theta.numpy(), block.velocity.numpy()
    rates = np.array([eta, mu], np.float32)
    numba.nesterov(addresses, block.portions, theta, velocity, rates, new, new_velocity, squares)
    found: list[float] = squares.tolist()
    return found
