"""A mean and Nesterov's step on it, row by row: each array is read from memory once, and only results are written.

Every result is to the bit that of the same operations by torch, which rounds product and sum at once (FMA) in `lerp`
and in `add` with `alpha`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from hypha_ray.kernels.compiled_copy import pointer
from hypha_ray.kernels.outer import SMALL

_ROW = 2048
_READ, _WRITTEN = types.Array(types.f4, 1, "C", readonly=True), types.Array(types.f4, 1, "C")
_TABLE = types.Array(types.f4, 2, "C", readonly=True)
_ADDRESSES, _SQUARES = types.Array(types.u8, 1, "C", readonly=True), types.Array(types.f8, 1, "C")
_Array = Any


@intrinsic
def _fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a·b + c, rounded once."""
    return types.f4(types.f4, types.f4, types.f4), lambda _, builder, __, values: builder.fma(*values)


@njit(types.f4(_READ, _READ), nogil=True, cache=True, fastmath={"reassoc"})
def _sum(x: _Array, y: _Array) -> Any:
    total = np.float32(0)
    for i in range(len(x)):
        difference = x[i] - y[i]
        total += difference * difference
    return total


@njit(types.f8(_READ, _READ), nogil=True, cache=True)
def _square_distance(x: _Array, y: _Array) -> Any:
    """‖x − y‖² of a row, which neither overflow nor underflow spoils."""
    quick = np.float64(_sum(x, y))
    if SMALL < quick < math.inf:
        return quick
    total = 0.0
    for i in range(len(x)):
        difference = np.float64(x[i] - y[i])
        total += difference * difference
    return total


@njit(types.void(_READ, _READ, types.f4, _WRITTEN), nogil=True, cache=True)
def _lerp(start: _Array, end: _Array, rest: float, out: _Array) -> None:
    """What `torch.lerp` gives from a weight of ½ on; `rest` is weight − 1."""
    for i in range(len(start)):
        out[i] = _fma(rest, end[i] - start[i], end[i])


@njit(types.void(_READ, _READ, _READ, types.f4, types.f4, _WRITTEN), nogil=True, cache=True)
def _move(mean: _Array, theta: _Array, velocity: _Array, eta: float, mu: float, new: _Array) -> None:
    for i in range(len(theta)):
        delta = mean[i] - theta[i]
        new[i] = _fma(eta, _fma(mu, mu * velocity[i] + delta, delta), theta[i])


@njit(types.void(_READ, _READ, _READ, types.f4, _WRITTEN), nogil=True, cache=True)
def _speed_up(mean: _Array, theta: _Array, velocity: _Array, mu: float, new: _Array) -> None:
    for i in range(len(theta)):
        new[i] = mu * velocity[i] + (mean[i] - theta[i])


@njit(
    types.void(_ADDRESSES, _TABLE, _READ, _READ, _READ, _WRITTEN, _WRITTEN, _SQUARES),
    nogil=True,
    cache=True,
)
def nesterov(
    addresses: _Array,
    portions: _Array,
    theta: _Array,
    velocity: _Array,
    rates: _Array,
    new: _Array,
    new_velocity: _Array,
    squares: _Array,
) -> None:
    """Average weights that lie at these addresses, and take a step on the mean; see `outer.nesterov`."""
    rooms = np.empty((3, _ROW), np.float32)
    for start in range(0, len(theta), _ROW):
        end = min(start + _ROW, len(theta))
        size = end - start
        before = theta[start:end]
        mean = before
        for worker in range(len(addresses)):
            value = carray(pointer(addresses[worker] + np.uint64(4 * start)), (size,), np.float32)
            squares[worker] += _square_distance(value, before)
            room = rooms[worker % 2, :size]
            if worker == 0:
                mean = value
            elif portions[worker, 1]:
                _lerp(mean, value, portions[worker, 0], room)
                mean = room
            else:
                _lerp(value, mean, portions[worker, 0], room)
                mean = room
        after = new[start:end] if len(new) else rooms[2, :size]
        _move(mean, before, velocity[start:end], rates[0], rates[1], after)
        squares[len(addresses)] += _square_distance(after, before)
        if len(new_velocity):
            _speed_up(mean, before, velocity[start:end], rates[1], new_velocity[start:end])
