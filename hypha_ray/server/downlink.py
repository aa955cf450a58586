"""Weights as workers are sent them: with a downward codec, as encoded difference to the old ones."""

from __future__ import annotations

from dataclasses import replace

from hypha_ray.codec import payload_bytes
from hypha_ray.codec.difference import publish
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.types import Flat, Verdict

_LEFT_OUT = "left-out/"
"""Before a group's name, in the outer state: what differences have lacked so far."""


def apart(momentum: Flat) -> tuple[Flat, Flat]:
    """The outer optimizer's own state, and what differences have lacked so far, by group."""
    own = {name: array for name, array in momentum.items() if not name.startswith(_LEFT_OUT)}
    left_out = {name.removeprefix(_LEFT_OUT): array for name, array in momentum.items() if name not in own}
    return own, left_out


def published(
    codec: Chunked, decay: float, theta: Flat, left_out: Flat, result: tuple[Flat, Flat, Verdict]
) -> tuple[Flat, Flat, Flat, Verdict]:
    """A reduction's result as all workers will have it.

    Args:
        codec: what differences are encoded by.
        decay: part of what was left out that is made up for.
        theta: the weights before the step.
        left_out: what was left out so far.
        result: what `reduce` gave; its weights are overwritten.

    Returns:
        New weights, new state with what is left out now, the difference, and the verdict.

    """
    new, state, verdict = result
    payload: Flat = {}
    if verdict.accepted:
        payload, left_out = publish(codec, decay, theta, new, left_out)
        verdict = replace(verdict, coded_bytes=payload_bytes(payload))
    return new, state | {_LEFT_OUT + group: array for group, array in left_out.items()}, payload, verdict
