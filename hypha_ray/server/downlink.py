"""Weights as they are sent to workers: with a downward codec, as encoded difference to the old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hypha_ray.codec import payload_bytes
from hypha_ray.codec.blocks import tensors
from hypha_ray.codec.feedback import publish
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.config.schema import Job
from hypha_ray.store.restore_point import saved_layout
from hypha_ray.store.snapshots import Snapshot
from hypha_ray.store.tensorfile import Array, flattened, flattened_outer, named
from hypha_ray.types import Flat, Verdict

_RESIDUAL = "left-out/"
"""Prefix of a group's name in the outer state: the accumulated encoding error of the differences."""


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
    codec: Chunked, decay: float, theta: Flat, residual: Flat, result: tuple[Flat, Flat, Verdict]
) -> tuple[Flat, Flat, Flat, Verdict]:
    """Encode the result of `reduce`, and overwrite its weights by those that all workers will decode.

    Returns:
        New weights, new state with the new encoding error, the encoded difference, and the verdict.

    """
    new, state, verdict = result
    payload: Flat = {}
    if verdict.accepted:
        payload, residual = publish(codec, decay, theta, new, residual)
        verdict = replace(verdict, coded_bytes=payload_bytes(payload))
    named_residual = {_RESIDUAL + group: array for group, array in residual.items()}
    return new, state | named_residual, payload, verdict


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
    """Add what was left out of weights, but for the last bit of those that would have another bfloat16 form."""
    whole = (weights.float() + left_out).to(weights.dtype)
    same = whole.to(torch.bfloat16).view(torch.int16) == weights.to(torch.bfloat16).view(torch.int16)
    torch.where(same, whole, weights, out=weights)
