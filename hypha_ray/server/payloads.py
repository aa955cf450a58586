"""Payloads at the server: admission of workers' ones to the mean, and weights as they are sent to workers.

A payload's form is checked before its values are read. Values that aren't finite show in the norm, which the sweep over
memory measures while it averages. The sweep is repeated without a payload that fails. So a rejected delta has the same
effect as an absent one, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from hypha_ray.codec import Form, payload_bytes
from hypha_ray.codec.feedback import publish, tensors
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.config.schema import Job
from hypha_ray.errors import guarded
from hypha_ray.kernels import SMALL
from hypha_ray.plugins import is_own
from hypha_ray.store.restore_point import saved_layout
from hypha_ray.store.snapshots import Array, Snapshot, flattened, flattened_outer, named
from hypha_ray.types import Flat, Rejection, Verdict

_ENOUGH = 3
_ROW = 4096
_RESIDUAL = "left-out/"
"""Prefix of a group's name in the outer state: the accumulated encoding error of the differences."""


class Received(NamedTuple):
    """A delta as it reached the server, with its weight in the mean."""

    worker: int
    incarnation: int
    weight: int
    payload: Flat


def admit(
    received: Iterable[Received], form: Mapping[str, Form], least_weight: int = 1
) -> tuple[list[Received], list[Rejection]]:
    """Sort deltas by worker, and reject those that have a wrong form or too small a weight.

    If a worker has several deltas, one of its newest incarnation is admitted.
    """
    admitted: list[Received] = []
    rejected: list[Rejection] = []
    for delta in sorted(received, key=lambda delta: (delta.worker, -delta.incarnation)):
        if admitted and admitted[-1].worker == delta.worker:
            reason: str | None = f"repeated: incarnation {admitted[-1].incarnation} of this worker is taken"
        elif delta.weight < least_weight:
            reason = f"weight {delta.weight}"
        else:
            reason = misfit(delta.payload, form)
        if reason is None:
            admitted.append(delta)
        else:
            rejected.append(Rejection(delta.worker, reason))
    return admitted, rejected


def misfit(payload: Flat, form: Mapping[str, Form]) -> str | None:
    """Describe how a payload differs from the form required by layout and codec; None if it doesn't."""
    if payload.keys() != form.keys():
        return f"groups {', '.join(sorted(payload))} instead of {', '.join(sorted(form))}"
    for group, (dtype, elements, is_exact) in form.items():
        array = payload[group]
        if array.dtype != np.dtype(dtype):
            return f"dtype {array.dtype} of {group} instead of {dtype}"
        size_fits = array.size == elements if is_exact else array.size <= elements
        if array.ndim != 1 or not size_fits or not array.flags.c_contiguous:
            at_most = "" if is_exact else " at most"
            return f"shape {array.shape} of {group} instead of {(elements,)}{at_most}, contiguous"
    return None


def excessive(norms: Sequence[float], times: float, known_norms: Sequence[float] = ()) -> list[str | None]:
    """Reason to reject each delta: its norm exceeds `times` the median, known norms included; None if it doesn't."""
    median_norm = _median([*norms, *known_norms])
    limit = times * median_norm if median_norm else math.inf
    reasons: list[str | None] = []
    for norm in norms:
        if norm > limit:
            reasons.append(f"norm {norm:.3g} is more than {times:g} times the median {median_norm:.3g}")
        else:
            reasons.append(None)
    return reasons


def clip_scales(norms: Sequence[float], times: float, known_norms: Sequence[float] = ()) -> list[float]:
    """Factor of each delta that limits its norm to `times` the median, known norms included."""
    limit = times * _median([*norms, *known_norms])
    return [limit / norm if norm > limit > 0 else 1.0 for norm in norms]


def _median(norms: Sequence[float]) -> float:
    """Median of at least three norms; otherwise 0: of two, neither can be called the outlier."""
    return median(norms) if len(norms) >= _ENOUGH else 0.0


def square_sum(values: torch.Tensor) -> float:
    """Sum of squares of a block, in float64; NaN or infinite only if a value is.

    Squares of 4096 values at a time are added in the tensor's precision, which takes a quarter of the time that
    converting all values takes. If squares overflow or underflow, the sum is taken in float64.
    """
    array = values.numpy()
    tail_start = array.size - array.size % _ROW
    rows = array[:tail_start].reshape(-1, _ROW)
    tail = array[tail_start:]
    with np.errstate(all="ignore"):
        row_squares = np.vecdot(rows, rows)
        total = float(row_squares.sum(dtype=np.float64)) + float(np.vdot(tail, tail))
        if SMALL < total < math.inf:
            return total
        float64_array = array.astype(np.float64)
        return float(np.vdot(float64_array, float64_array))


def square_distance(new_values: torch.Tensor, old_values: torch.Tensor, scratch: torch.Tensor) -> float:
    """Squared L2 norm of a difference by `square_sum`; `scratch` is scratch space of its size."""
    return square_sum(torch.sub(new_values, old_values, out=scratch))


def split_state(momentum: Flat) -> tuple[Flat, Flat]:
    """Split outer state into that of the optimizer, and the accumulated encoding error by group."""
    optimizer_state = {}
    residual = {}
    for name, array in momentum.items():
        if name.startswith(_RESIDUAL):
            residual[name.removeprefix(_RESIDUAL)] = array
        else:
            optimizer_state[name] = array
    return optimizer_state, residual


def encode_result(
    name: str, codec: Chunked, decay: float, theta: Flat, residual: Flat, result: tuple[Flat, Flat, Verdict]
) -> tuple[Flat, Flat, Flat, Verdict]:
    """Encode the result of `reduce`, and overwrite its weights by those that all workers will decode.

    `name` is the codec's in the job file.

    Returns:
        New weights, new state with the new encoding error, the encoded difference, and the verdict.

    """
    new_theta, outer_state, verdict = result
    payload: Flat = {}
    if verdict.accepted:
        encode = guarded(f"codec {name}", publish) if is_own("codecs", name) else publish
        payload, residual = encode(codec, decay, theta, new_theta, residual)
        verdict = replace(verdict, coded_bytes=payload_bytes(payload))
    named_residual = {_RESIDUAL + group: array for group, array in residual.items()}
    return new_theta, outer_state | named_residual, payload, verdict


def weights_to_save(job: Job, snapshot: Snapshot) -> Mapping[str, Array]:
    """Return a snapshot's weights, with what codec `visible` has left out of them if their bfloat16 form stays.

    So a model that is saved has all that was learned, and its bfloat16 form is that of the committed weights.
    """
    layout = saved_layout(snapshot.state)
    if job.sync.downward_codec != "visible" or layout is None:
        return snapshot.tensors
    theta = flattened(layout, snapshot.tensors)
    for flat, state in zip(theta, flattened_outer(layout, snapshot.outer), strict=True):
        _, residual = split_state(state)
        weights = tensors(flat)
        for group, left_out in tensors(residual).items():
            add_left_out(weights[group], left_out)
    return named(layout, theta)


def add_left_out(weights: torch.Tensor, left_out: torch.Tensor) -> None:
    """Add what was left out of weights, except where it would change their bfloat16 form."""
    full_weights = (weights.float() + left_out).to(weights.dtype)
    keeps_form = full_weights.to(torch.bfloat16).view(torch.int16) == weights.to(torch.bfloat16).view(torch.int16)
    torch.where(keeps_form, full_weights, weights, out=weights)
