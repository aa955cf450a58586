"""Calls of the compiled passes: copies that go past the caches, and DiLoCo's outer step in one pass over memory.

Numba is loaded only for large arrays: that takes a second and 50 MB.
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
"""Float32 values that are loaded, worked on and stored at a time: 64 bytes, a line of the caches."""
LEAST = {"copy": 1 << 18, "outer": 1 << 20}
"""Elements from which on it is worth it. What is smaller to copy stays in the caches, and may be wanted there."""


def is_worth_it(name: str, elements: int) -> bool:
    """Whether arrays of so many elements are large enough for a module, and it can be had."""
    return elements >= LEAST[name] and compiled(name) is not None


@cache
def compiled(name: str) -> ModuleType | None:
    """A module beside this one, `compiled_` and the name; None where numba can't compile it."""
    try:
        return import_module(f"hypha_ray.kernels.compiled_{name}")
    except Exception:  # It isn't there, doesn't know this processor, or finds no folder to keep what it compiles.
        return None


def load_ahead(name: str, elements: int) -> None:
    """Load such a module for arrays of so many elements, beside whatever else goes on: compiling takes seconds."""
    if elements >= LEAST[name]:
        Thread(target=compiled, args=(name,), name=f"loads {name}", daemon=True).start()


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy as ``out.copy_(source)``; large fp32 arrays are written without being read into the caches before.

    `torch` and the C library read each line of the target from memory first, unless they copy tens of megabytes at
    once. Without that two processes can copy at the same time as fast as one alone.

    Args:
        source: of any shape, never written to.
        out: of the same shape.

    """
    plain = (one.dtype == torch.float32 and one.is_cpu and one.is_contiguous() for one in (source, out))
    if source.shape == out.shape and all(plain) and is_worth_it("copy", out.numel()):
        numba = compiled("copy")
        assert numba is not None
        numba.copy(source.data_ptr(), out.data_ptr(), out.numel())
    else:
        out.copy_(source)


SMALL = 1e-24
"""A sum of squares from which on fp32 loses nothing that counts."""
_Table = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def portions(shares: Sequence[float]) -> _Table:
    """Arguments of `torch.lerp` for values, each with its share in the mean so far.

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
    """Destination of new θ; None: it isn't wanted."""
    new_velocity: torch.Tensor | None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Averaged:
        """Return the same with all tensors changed."""
        values = [change(value) for value in self.values]
        results = (self.new, self.new_velocity)
        changed = (None if result is None else change(result) for result in results)
        return Averaged(values, self.portions, change(self.theta), change(self.velocity), *changed)


def nesterov(eta: float, mu: float, block: Averaged) -> list[float]:
    """Take Nesterov's step v ← μv + Δ̄; θ ← θ + η(μv + Δ̄), where Δ̄ is the mean of the workers' weights without θ.

    Returns:
        Squared L2 norms: of each worker's weights without θ, and of θ's change.

    """
    left = len(block.theta) % LANES
    whole = len(block.theta) - left
    squares = np.zeros(len(block.values) + 1)
    _take_step(eta, mu, block.each(lambda tensor: tensor[:whole]), squares)
    if left:
        padded = block.each(lambda tensor: pad(tensor[whole:], (0, LANES - left)))
        _take_step(eta, mu, padded, squares)
        for out, result in ((block.new, padded.new), (block.new_velocity, padded.new_velocity)):
            if out is not None and result is not None:
                out[whole:] = result[:left]
    found: list[float] = squares.tolist()
    return found


def _take_step(eta: float, mu: float, block: Averaged, squares: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    """Take the step with a multiple of `LANES` values, and add squared norms."""
    numba = compiled("outer")
    assert numba is not None
    state = (block.theta, block.velocity)
    outs = (block.new, block.new_velocity)
    values, old, new = (_addresses(tensors) for tensors in (block.values, state, outs))
    numba.nesterov(values, block.portions, old, np.array([eta, mu], np.float32), new, len(block.theta), squares)


def _addresses(tensors: Sequence[torch.Tensor | None]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array([0 if tensor is None else tensor.data_ptr() for tensor in tensors], np.uint64)
