"""New weights as their coded difference to the old ones: what both ends make of it, to the bit."""

from __future__ import annotations

import numpy as np
import torch

from hypha_ray.codec.blocks import blocks
from hypha_ray.codec.feedback import Feedback
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.codec.views import tensors
from hypha_ray.types import Flat
from hypha_ray.types.layout import is_trained


def advance(codec: Chunked, theta: Flat, payload: Flat, out: Flat | None = None) -> Flat:
    """Add a decoded difference to weights, block by block.

    Args:
        codec: what it was encoded by.
        theta: the weights that it is a difference to, never written to.
        payload: the difference; buffers are there as they are.
        out: arrays to write to; None: make some.

    """
    result: Flat = {group: np.empty_like(array) for group, array in theta.items()} if out is None else out
    before = tensors(theta)
    coded = tensors(payload)
    after = tensors(result)
    for group, old in before.items():
        if is_trained(group):
            for part in blocks(len(old)):
                torch.add(old[part], codec.decode(coded, group, part), out=after[group][part])
        else:
            after[group].copy_(coded[group])
    return result


def publish(codec: Chunked, decay: float, theta: Flat, new: Flat, left_out: Flat) -> tuple[Flat, Flat]:
    """Encode a step of the weights, and set them to the weights that its decoding gives.

    Args:
        codec: what it is encoded by.
        decay: part of what was left out before that is made up for.
        theta: the weights before the step, which all workers have.
        new: the weights after it; overwritten by the weights that all workers will have.
        left_out: what was left out so far, by group; never written to.

    Returns:
        The payload, whose buffers share memory with the new weights, and what is left out now.

    """
    sender = Feedback(codec, decay)
    sender.residual = {group: array.copy() for group, array in left_out.items()}
    payload, _ = sender.encode(new, theta)
    advance(codec, theta, payload, out=new)
    return payload, sender.residual
