"""Passes over large arrays that numba compiles, or torch computes if numba can't; results are the same to the bit.

They are copies that go past the caches, and DiLoCo's outer step in one pass over memory. Numba is loaded only for large
arrays: that takes a second and 50 MB. It keeps compiled code beside its source, so only the first process on a machine
waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from threading import Thread
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

LANES = 16
"""Number of float32 values that are loaded, worked on and stored at a time: 64 bytes, a line of the caches."""
LEAST = {"copy": 1 << 18, "outer": 1 << 20, "patches": 1}
"""Number of elements from which a compiled pass is faster. Smaller copies stay in the caches for their readers."""
SMALL = 1e-24
"""Smallest sum of squares that is accurate in fp32: below, squares underflow."""
_Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def is_worth_it(name: str, elements: int) -> bool:
    """Whether a compiled pass is available, and arrays of this size are large enough for it."""
    return elements >= LEAST[name] and compiled(name) is not None


@cache
def compiled(name: str) -> ModuleType | None:
    """Import the module ``compiled_NAME`` beside this one; None if numba can't compile it."""
    try:
        return import_module(f"hypha_ray.kernels.compiled_{name}")
    except Exception:  # Numba is missing, doesn't know this processor, or finds no folder for its cache.
        return None


def load_ahead(name: str, elements: int) -> None:
    """Load a compiled pass in a thread, if arrays of this size are large enough for it: compiling takes seconds."""
    if elements >= LEAST[name]:
        Thread(target=compiled, args=(name,), name=f"loads {name}", daemon=True).start()


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy as ``out.copy_(source)``; large fp32 arrays are written without being read into the caches before.

    `torch` and the C library read each line of the target from memory first, unless they copy tens of megabytes at
    once. Without that two processes can copy at the same time as fast as one alone.

    Args:
        source: tensor of any shape, never written to.
        out: tensor of the same shape.

    """
    is_plain = source.shape == out.shape and _is_plain(source) and _is_plain(out)
    if is_plain and is_worth_it("copy", out.numel()):
        numba = compiled("copy")
        assert numba is not None
        numba.copy(source.data_ptr(), out.data_ptr(), out.numel())
    else:
        out.copy_(source)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a contiguous float32 array of the host."""
    return tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def portions(shares: Sequence[float]) -> _Table:
    """Return arguments of `torch.lerp` for a running mean of values.

    Args:
        shares: share of each value in the mean of the values up to it.

    Returns:
        Shape (values, 2): the larger weight of value and mean, less 1; and 1 if that is the value's, otherwise 0.

    """
    larger_shares = np.array([max(share, 1 - share) for share in shares], np.float32)
    is_of_value = np.array([share >= 0.5 for share in shares], np.float32)
    weights = larger_shares - np.float32(1)
    return np.stack([weights, is_of_value], 1)


class Averaged(NamedTuple):
    """Inputs and outputs of the fused outer step: 1-D fp32 tensors of equal size."""

    values: Sequence[torch.Tensor]
    """Weights of each worker."""
    portions: _Table
    """Weights of the mean, from `portions`."""
    theta: torch.Tensor
    velocity: torch.Tensor
    new_theta: torch.Tensor | None
    """Destination of the new θ; None: it isn't computed."""
    new_velocity: torch.Tensor | None
    """Destination of the new momentum; None: it isn't written."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Averaged:
        """Return inputs and outputs with a function applied to each tensor."""
        return Averaged(
            values=[change(value) for value in self.values],
            portions=self.portions,
            theta=change(self.theta),
            velocity=change(self.velocity),
            new_theta=None if self.new_theta is None else change(self.new_theta),
            new_velocity=None if self.new_velocity is None else change(self.new_velocity),
        )


def nesterov(eta: float, mu: float, block: Averaged) -> list[float]:
    """Take Nesterov's step v ← μv + Δ̄; θ ← θ + η(μv + Δ̄), where Δ̄ is the mean of the workers' weights less θ.

    Returns:
        Squared L2 norms of each worker's delta (its weights less θ), and of θ's change.

    """
    remainder = len(block.theta) % LANES
    whole_size = len(block.theta) - remainder
    squares = np.zeros(len(block.values) + 1)
    _take_step(eta, mu, block.each(lambda tensor: tensor[:whole_size]), squares)
    if remainder:
        padding = (0, LANES - remainder)
        padded_block = block.each(lambda tensor: pad(tensor[whole_size:], padding))
        _take_step(eta, mu, padded_block, squares)
        if block.new_theta is not None and padded_block.new_theta is not None:
            block.new_theta[whole_size:] = padded_block.new_theta[:remainder]
        if block.new_velocity is not None and padded_block.new_velocity is not None:
            block.new_velocity[whole_size:] = padded_block.new_velocity[:remainder]
    norms: list[float] = squares.tolist()
    return norms


def _take_step(eta: float, mu: float, block: Averaged, squares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """Take the step with a multiple of `LANES` values, and add squared norms to `squares`."""
    numba = compiled("outer")
    assert numba is not None
    values = _addresses(block.values)
    state = _addresses((block.theta, block.velocity, block.new_theta, block.new_velocity))
    rates = np.array([eta, mu], np.float32)
    line_bytes = 4 * LANES
    lines = np.empty((len(values) + 1) * LANES, np.float32)
    first_line = -(-lines.ctypes.data // line_bytes) * line_bytes
    # Memory is allocated here: numba frees an array after the last use of its name, even if its address is in use.
    unwanted = np.empty(numba.ROW, np.float32)
    scratch = np.empty(len(values) + 1, np.uint64)
    scratch[:-1] = first_line + line_bytes * np.arange(len(values))
    scratch[-1] = unwanted.ctypes.data
    numba.nesterov(values, block.portions, state, rates, len(block.theta), scratch, squares)


def _addresses(tensors: Sequence[torch.Tensor | None]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the addresses of tensors; 0 for None."""
    addresses: list[int] = []
    for tensor in tensors:
        addresses.append(0 if tensor is None else tensor.data_ptr())
    return np.array(addresses, np.uint64)
