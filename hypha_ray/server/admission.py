"""Admission of payloads to the mean: form, finite values, and norm.

A payload must have the right form before it is touched. Values that aren't finite show in the norm, which the averaging
sweep over memory measures. The sweep is repeated without a payload that fails there. So a rejected delta is the same as
an absent one, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from hypha_ray.codec import Form
from hypha_ray.kernels import SMALL
from hypha_ray.types import Flat, Rejection

_ENOUGH = 3
_ROW = 4096


class Received(NamedTuple):
    """A delta as it reached the server, with its weight in the mean."""

    worker: int
    incarnation: int
    weight: int
    payload: Flat


def admit(
    received: Iterable[Received], form: Mapping[str, Form], least: int = 1
) -> tuple[list[Received], list[Rejection]]:
    """Sort deltas by worker, and turn away those that can't be computed with.

    Of a worker that is there more than once the newest incarnation counts, and of that one delta.
    """
    admitted: list[Received] = []
    rejected: list[Rejection] = []
    for delta in sorted(received, key=lambda one: (one.worker, -one.incarnation)):
        if admitted and admitted[-1].worker == delta.worker:
            reason: str | None = f"repeated: incarnation {admitted[-1].incarnation} of this worker is taken"
        elif delta.weight < least:
            reason = f"weight {delta.weight}"
        else:
            reason = misfit(delta.payload, form)
        if reason is None:
            admitted.append(delta)
        else:
            rejected.append(Rejection(delta.worker, reason))
    return admitted, rejected


def misfit(payload: Flat, form: Mapping[str, Form]) -> str | None:
    """Say in what a payload differs from the form that the layout and the codec ask for; None if in nothing."""
    if payload.keys() != form.keys():
        return f"groups {', '.join(sorted(payload))} instead of {', '.join(sorted(form))}"
    for group, (dtype, size, exact) in form.items():
        array = payload[group]
        if array.dtype != np.dtype(dtype):
            return f"dtype {array.dtype} of {group} instead of {dtype}"
        fits = array.size == size if exact else array.size <= size
        if array.ndim != 1 or not fits or not array.flags.c_contiguous:
            return f"shape {array.shape} of {group} instead of {(size,)}{'' if exact else ' at most'}, contiguous"
    return None


def excessive(norms: Sequence[float], times: float, known: Sequence[float] = ()) -> list[str | None]:
    """Say which deltas are longer than so many times the median norm, earlier `known` ones included; or else None."""
    middle = _typical([*norms, *known])
    limit = times * middle if middle else math.inf
    return [f"norm {n:.3g} is more than {times:g} times the median {middle:.3g}" if n > limit else None for n in norms]


def clip_scales(norms: Sequence[float], times: float, known: Sequence[float] = ()) -> list[float]:
    """Factor of each delta, by which none is longer than so many times the median norm."""
    limit = times * _typical([*norms, *known])
    return [limit / norm if norm > limit > 0 else 1.0 for norm in norms]


def _typical(norms: Sequence[float]) -> float:
    """Median of the norms; 0, by which nothing can be measured, where there are only two: which one is the odd one?"""
    return median(norms) if len(norms) >= _ENOUGH else 0.0


def square_sum(values: torch.Tensor) -> float:
    """Sum of squares of a block, in float64; NaN or infinite only if a value is.

    The squares of 4096 values at a time are added in the tensor's own precision, which costs a quarter of converting
    them all. If squares would overflow or vanish, all is done in float64.
    """
    array = values.numpy()
    whole = array.size - array.size % _ROW
    rows, rest = array[:whole].reshape(-1, _ROW), array[whole:]
    with np.errstate(all="ignore"):
        total = float(np.vecdot(rows, rows).sum(dtype=np.float64)) + float(np.vdot(rest, rest))
        if SMALL < total < math.inf:
            return total
        wide = array.astype(np.float64)
        return float(np.vdot(wide, wide))


def square_distance(one: torch.Tensor, other: torch.Tensor, room: torch.Tensor) -> float:
    """Squared L2 norm of a difference, as `square_sum` takes it; there must be room for the difference."""
    return square_sum(torch.sub(one, other, out=room))
