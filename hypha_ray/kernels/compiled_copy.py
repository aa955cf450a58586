"""Stores that the processor doesn't keep in its caches (non-temporal ones), of 64 bytes each."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_LINE = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """An address as what `carray` takes."""
    return types.voidptr(types.uint64), lambda _, builder, __, values: builder.inttoptr(values[0], cgutils.voidptr_t)


@intrinsic
def _stream(_: Any, source: Any, out: Any) -> Any:
    """Copy 64 bytes between two addresses, of which the second is a multiple of 64."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        there, here = (builder.inttoptr(value, _LINE.as_pointer()) for value in values)
        store = builder.store(builder.load(there, align=4), here, align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _fence(_: Any) -> Any:
    """Nothing after this is seen before what is stored above."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit(types.void(types.uint64, types.uint64, types.intp), nogil=True, cache=True)
def copy(source: int, out: int, size: int) -> None:
    """Copy so many 4-byte elements from one address to another."""
    here, there = carray(pointer(out), (size,), np.float32), carray(pointer(source), (size,), np.float32)
    head = int(-out % np.uint64(64)) // 4
    head = size if size < head else head
    middle = head + (size - head) // LANES * LANES
    for i in range(head):
        here[i] = there[i]
    for i in range(head, middle, LANES):
        _stream(source + np.uint64(4 * i), out + np.uint64(4 * i))
    for i in range(middle, size):
        here[i] = there[i]
    _fence()
