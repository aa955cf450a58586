"""Copies by non-temporal stores of 64 bytes, which the processor doesn't keep in its caches."""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from hypha_ray.kernels.lanes import fence, load, pointer, stream
from hypha_ray.kernels.passes import LANES


@njit(types.void(types.uint64, types.uint64, types.intp), nogil=True, cache=True)
def copy(source: int, out: int, size: int) -> None:
    """Copy `size` elements of 4 bytes from one address to another."""
    here = carray(pointer(out), (size,), np.float32)
    there = carray(pointer(source), (size,), np.float32)
    head = int(-out % np.uint64(64)) // 4
    head = size if size < head else head
    middle = head + (size - head) // LANES * LANES
    for i in range(head):
        here[i] = there[i]
    for i in range(head, middle, LANES):
        stream(out + np.uint64(4 * i), load(source + np.uint64(4 * i)))
    for i in range(middle, size):
        here[i] = there[i]
    fence()
