"""Copies by non-temporal stores of 64 bytes, which the processor doesn't keep in its caches."""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types

from hypha_ray.kernels import LANES
from hypha_ray.kernels.lanes import fence, load, pointer, stream


@njit(types.void(types.uint64, types.uint64, types.intp), nogil=True, cache=True)
def copy(source: int, out: int, elements: int) -> None:
    """Copy this number of elements of 4 bytes from one address to another."""
    target = carray(pointer(out), (elements,), np.float32)
    values = carray(pointer(source), (elements,), np.float32)
    unaligned_bytes = int(-out % np.uint64(64))
    head = min(elements, unaligned_bytes // 4)
    middle = head + (elements - head) // LANES * LANES
    for i in range(head):
        target[i] = values[i]
    for i in range(head, middle, LANES):
        offset = np.uint64(4 * i)
        lanes = load(source + offset)
        stream(out + offset, lanes)
    for i in range(middle, elements):
        target[i] = values[i]
    fence()
