"""Weights as they are sent to workers: with a downward codec, as encoded difference to the old ones."""

from __future__ import annotations

from dataclasses import replace

from hypha_ray.codec import payload_bytes
from hypha_ray.codec.feedback import publish
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.types import Flat, Verdict

_LEFT_OUT = "left-out/"
"""Prefix of a group's name in the outer state: the accumulated encoding error of the differences."""


def apart(momentum: Flat) -> tuple[Flat, Flat]:
    """Split outer state into the optimizer's own, and the accumulated encoding error by group."""
    own = {name: array for name, array in momentum.items() if not name.startswith(_LEFT_OUT)}
    left_out = {name.removeprefix(_LEFT_OUT): array for name, array in momentum.items() if name not in own}
    return own, left_out


def published(
    codec: Chunked, decay: float, theta: Flat, left_out: Flat, result: tuple[Flat, Flat, Verdict]
) -> tuple[Flat, Flat, Flat, Verdict]:
    """A reduction's result as all workers will decode it.

    Args:
        codec: codec of the difference.
        decay: factor of the encoding error that is added to the next difference.
        theta: the weights before the step.
        left_out: the accumulated encoding error.
        result: result of `reduce`; its weights are overwritten.

    Returns:
        New weights, new state with the new encoding error, the encoded difference, and the verdict.

    """
    new, state, verdict = result
    payload: Flat = {}
    if verdict.accepted:
        payload, left_out = publish(codec, decay, theta, new, left_out)
        verdict = replace(verdict, coded_bytes=payload_bytes(payload))
    return new, state | {_LEFT_OUT + group: array for group, array in left_out.items()}, payload, verdict
