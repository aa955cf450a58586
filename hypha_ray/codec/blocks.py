"""Blocks of arrays, which fit into a processor's caches, and tensors that share the arrays' memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from hypha_ray.types import Flat

BLOCK = 1 << 18
"""Number of elements that are worked on at a time and fit into caches: a multiple of every codec's chunk."""


def blocks(size: int, block: int = BLOCK) -> Iterator[slice]:
    """Cut a range of elements into blocks."""
    for start in range(0, size, block):
        yield slice(start, min(start + block, size))


def tensors(flat: Flat) -> dict[str, torch.Tensor]:
    """View arrays as tensors, without a copy.

    Ray's arrays are read-only and shared by all readers on a node. Torch has no read-only tensors: it warns, and would
    write all the same. So the caller must not write into tensors of arrays that aren't its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return {group: torch.from_numpy(array) for group, array in flat.items()}
