"""Vectors of `LANES` float32 values as a type that numba compiles to vector registers.

``+``, ``-`` and ``*`` compute lane by lane, and each is rounded. Nothing is reordered, so results are those of a loop
over single values, which LLVM doesn't always vectorize.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

from hypha_ray.kernels import LANES

_INDEX = ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class _Lanes(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("Lanes")


_LANES = _Lanes()


@register_model(_Lanes)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector_type: Any) -> None:
        super().__init__(manager, vector_type, _VECTOR)


def _operation(symbol: Callable[[Any, Any], Any], name: str) -> None:
    """Compile an operator on vectors to the instruction of LLVM with this name."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        instruction = getattr(builder, name)
        return instruction(*values)

    @intrinsic
    def compute(_: Any, a: Any, b: Any) -> Any:
        return _LANES(_LANES, _LANES), generate

    def computed(a: Any, b: Any) -> Any:
        return compute(a, b)

    @overload(symbol)
    def operation(a: Any, b: Any) -> Any:
        return computed if a == b == _LANES else None


_operation(operator.add, "fadd")
_operation(operator.sub, "fsub")
_operation(operator.mul, "fmul")


@intrinsic
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a·b + c, rounded once."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        name = f"llvm.fma.v{LANES}f32"
        function = cgutils.get_or_insert_function(builder.module, signature, name)
        return builder.call(function, values)

    return _LANES(_LANES, _LANES, _LANES), generate


@intrinsic
def splat(_: Any, value: Any) -> Any:
    """Return a value in all lanes."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first_lane = ir.Constant(_INDEX, 0)
        first = builder.insert_element(undefined, values[0], first_lane)
        indices = ir.VectorType(_INDEX, LANES)
        zeros = ir.Constant(indices, [0] * LANES)
        return builder.shuffle_vector(first, first, zeros)

    return _LANES(types.f4), generate


@intrinsic
def total(_: Any, lanes: Any) -> Any:
    """Return the sum over all lanes, from the first to the last."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        lanes = []
        for index in range(LANES):
            lane = builder.extract_element(values[0], ir.Constant(_INDEX, index))
            lanes.append(lane)
        return reduce(builder.fadd, lanes)

    return types.f4(_LANES), generate


@intrinsic
def load(_: Any, address: Any) -> Any:
    """Return the values at an address, a multiple of 4."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        source = _pointer(builder, values[0])
        return builder.load(source, align=4)

    return _LANES(types.uint64), generate


@intrinsic
def store(_: Any, address: Any, value: Any) -> Any:
    """Write to an address, a multiple of 4."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        target = _pointer(builder, values[0])
        builder.store(values[1], target, align=4)
        return context.get_dummy_value()

    return types.void(types.uint64, _LANES), generate


@intrinsic
def stream(_: Any, address: Any, value: Any) -> Any:
    """Write to an address, a multiple of 64, past the processor's caches (non-temporally)."""

    def generate(context: Any, builder: Any, _: Any, values: Any) -> Any:
        target = _pointer(builder, values[0])
        stored = builder.store(values[1], target, align=64)
        is_set = ir.Constant(_INDEX, 1)
        metadata = builder.module.add_metadata([is_set])
        stored.set_metadata("nontemporal", metadata)
        return context.get_dummy_value()

    return types.void(types.uint64, _LANES), generate


@intrinsic
def fence(_: Any) -> Any:
    """Fence: earlier stores become visible before later ones."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def pointer(_: Any, address: Any) -> Any:
    """Return an address as a pointer for `carray`."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


def _pointer(builder: Any, address: Any) -> Any:
    """Return an address as a pointer to a vector."""
    return builder.inttoptr(address, _VECTOR.as_pointer())
