"""What the server does most, compiled by numba: one pass over memory, where torch makes one for each operation.

Every result is to the bit that of the same operations by torch, which rounds product and sum at once (FMA) in `lerp`
and in `add` with `alpha`. The first import takes a second; later ones find what that compiled, beside this file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from hypha_ray.model.flat import Array

_ROW = 4096
_READ, _WRITTEN = types.Array(types.f4, 1, "C", readonly=True), types.Array(types.f4, 1, "C")


@intrinsic
def _fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a·b + c, rounded once."""
    return types.f4(types.f4, types.f4, types.f4), lambda _, builder, __, values: builder.fma(*values)


@njit(types.f4(_READ, _READ), nogil=True, cache=True, fastmath={"reassoc"})
def _row(x: Array, y: Array) -> Any:
    total = np.float32(0)
    for i in range(len(x)):
        difference = x[i] - y[i]
        total += difference * difference
    return total


@njit(types.f8(_READ, _READ), nogil=True, cache=True)
def square_distance(x: Array, y: Array) -> Any:
    """‖x − y‖², where neither overflow nor underflow spoils it: rows are summed in fp32, and added up in float64."""
    total = 0.0
    for start in range(0, len(x), _ROW):
        total += _row(x[start : start + _ROW], y[start : start + _ROW])
    return total


@njit(types.void(_READ, _READ, types.f4, _WRITTEN), nogil=True, cache=True)
def blend(start: Array, end: Array, rest: float, out: Array) -> None:
    """What `torch.lerp` gives from a weight of ½ on; `rest` is weight − 1."""
    for i in range(len(start)):
        out[i] = _fma(rest, end[i] - start[i], end[i])


@njit(types.void(_READ, _READ, _READ, types.f4, types.f4, _WRITTEN, _WRITTEN), nogil=True, cache=True)
def _step(mean: Array, theta: Array, velocity: Array, eta: float, mu: float, new: Array, new_velocity: Array) -> None:
    for i in range(len(theta)):
        delta = mean[i] - theta[i]
        faster = mu * velocity[i] + delta
        new_velocity[i] = faster
        new[i] = _fma(eta, _fma(mu, faster, delta), theta[i])


@njit(types.f8(_READ, _READ, _READ, types.f4, types.f4, _WRITTEN, _WRITTEN), nogil=True, cache=True)
def nesterov(mean: Array, theta: Array, velocity: Array, eta: float, mu: float, new: Array, new_velocity: Array) -> Any:
    """Take a step on the mean weights; returns ‖new − θ‖² like `square_distance`."""
    total = 0.0
    for start in range(0, len(theta), _ROW):
        end = start + _ROW
        after, before = new[start:end], theta[start:end]
        _step(mean[start:end], before, velocity[start:end], eta, mu, after, new_velocity[start:end])
        total += _row(after, before)
    return total
