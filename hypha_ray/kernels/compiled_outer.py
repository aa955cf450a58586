"""Mean of weights and Nesterov's step on it in one loop: memory is read once, and only results are written.

Results are bit-identical to those of torch, which rounds product and sum at once (FMA) in `lerp`
and in `add` with `alpha`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, njit, types

from hypha_ray.kernels import LANES, SMALL
from hypha_ray.kernels.lanes import fma, load, pointer, splat, store, total

ROW = 128 * LANES
"""Number of values whose squares are summed up in fp32."""
_ADDRESSES = types.Array(types.u8, 1, "C", readonly=True)
_TABLE = types.Array(types.f4, 2, "C", readonly=True)
_RATES = types.Array(types.f4, 1, "C", readonly=True)
_SQUARES = types.Array(types.f8, 1, "C")
_Array = Any
_ARGUMENTS = (_ADDRESSES, _TABLE, _ADDRESSES, _RATES, types.intp, _ADDRESSES, _SQUARES)


@njit(types.f8(types.f4, types.u8, types.u8, types.intp), nogil=True, cache=True, fastmath={"reassoc"})
def _square_distance(fast_sum: float, x: int, y: int, elements: int) -> Any:
    """‖x − y‖² of what lies at two addresses, measured anew where overflow or underflow may have spoilt `fast_sum`."""
    if SMALL < fast_sum < math.inf:
        return np.float64(fast_sum)
    minuends = carray(pointer(x), (elements,), np.float32)
    subtrahends = carray(pointer(y), (elements,), np.float32)
    squares = 0.0
    for i in range(elements):
        difference = np.float64(minuends[i] - subtrahends[i])
        squares += difference * difference
    return squares


@njit
def _clear(addresses: _Array, count: int) -> None:
    """Write zeros to `LANES` values at each of the first addresses."""
    zero = splat(np.float32(0))
    for i in range(count):
        store(addresses[i], zero)


@njit
def _add_square(address: int, delta: Any) -> None:
    """Add the square of a value in each lane to what lies at an address."""
    squares = load(address)
    store(address, squares + delta * delta)


@njit
def _mean_with(mean: Any, value: Any, less_one: float, is_of_value: float) -> Any:
    """Return a running mean with one more value, weighted as `passes.portions` says."""
    weight = splat(less_one)
    return fma(weight, value - mean, value) if is_of_value else fma(weight, mean - value, mean)


@njit(types.void(*_ARGUMENTS), nogil=True, cache=True)
def nesterov(
    values: _Array, portions: _Array, state: _Array, rates: _Array, elements: int, scratch: _Array, squares: _Array
) -> None:
    """Average weights and take a step on the mean; see `passes.nesterov`.

    Args:
        values: addresses of the workers' weights.
        portions: as `passes.portions` gives them.
        state: addresses of θ and momentum, and of where new ones go; 0: nowhere.
        rates: the outer learning rate, and the factor of momentum.
        elements: values of each array, a multiple of `LANES`.
        scratch: addresses of `LANES` float32 values for each worker, and of `ROW` values for a new θ that goes nowhere.
        squares: squared L2 norms of each worker's delta and of θ's change are added to these.

    """
    theta, velocity, new, new_velocity = state
    eta = splat(rates[0])
    mu = splat(rates[1])
    zero = splat(np.float32(0))
    workers = len(values)
    for start in range(0, elements, ROW):
        row = np.uint64(4 * start)
        length = min(ROW, elements - start)
        after = new + row if new else scratch[workers]
        first_squares = zero
        changed_squares = zero
        _clear(scratch, workers)
        for line in range(0, length, LANES):
            offset_in_row = np.uint64(4 * line)
            offset = row + offset_in_row
            before = load(theta + offset)
            mean = load(values[0] + offset)
            delta = mean - before
            first_squares = first_squares + delta * delta
            for worker in range(1, workers):
                value = load(values[worker] + offset)
                _add_square(scratch[worker], value - before)
                mean = _mean_with(mean, value, portions[worker, 0], portions[worker, 1])
            delta = mean - before
            faster = mu * load(velocity + offset) + delta
            moved = fma(eta, fma(mu, faster, delta), before)
            store(after + offset_in_row, moved)
            change = moved - before
            changed_squares = changed_squares + change * change
            if new_velocity:
                store(new_velocity + offset, faster)
        for worker in range(workers):
            lanes = first_squares if worker == 0 else load(scratch[worker])
            squares[worker] += _square_distance(total(lanes), values[worker] + row, theta + row, length)
        squares[workers] += _square_distance(total(changed_squares), after, theta + row, length)
