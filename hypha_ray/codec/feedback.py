"""Blocks of arrays, and encoders with error feedback that go through them: of deltas and of steps of weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from hypha_ray.codec.base import Quality
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.types import Flat
from hypha_ray.types.data import is_trained

BLOCK = 1 << 18
"""Number of elements that are worked on at a time and fit into caches: a multiple of every codec's chunk."""
_LAG = "momentum/"
"""Prefix of a group's name in an encoder's residual: the momentum that the receiver lacks for postponed changes."""


def blocks(elements: int, block: int = BLOCK) -> Iterator[slice]:
    """Cut a range of elements into blocks."""
    for start in range(0, elements, block):
        yield slice(start, min(start + block, elements))


def tensors(flat: Flat) -> dict[str, torch.Tensor]:
    """View arrays as tensors, without a copy.

    Ray's arrays are read-only and shared by all readers on a node. Torch has no read-only tensors: it warns, and writes
    nevertheless. So the caller must not write into tensors of arrays that aren't its own.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return {group: torch.from_numpy(array) for group, array in flat.items()}


class Feedback:
    """Encoder of one fragment's results with error feedback (Karimireddy et al., arXiv 1901.09847).

    The encoding error of each payload, times a decay, is added to the next payload before it is encoded. So with a
    decay of 1, all decoded payloads and the last encoding error add up to all values that were to be sent.

    Args:
        codec: codec of the payloads.
        decay: part of the encoding error that is made up for in the next round; 0: none of it.
        momentum: μ of the receiver's outer steps, if the last payload makes up for the momentum of postponed changes;
            otherwise 0.

    """

    def __init__(self, codec: Chunked, decay: float, momentum: float = 0.0) -> None:
        self._codec = codec
        self._decay = decay
        self._momentum = momentum
        self.residual: Flat = {}
        """Encoding error so far, by group, and lacking momentum; empty before the first round, and without feedback."""

    def encode(self, values: Flat, theta: Flat | None, is_last: bool = False) -> tuple[Flat, Quality]:
        """Encode a round's result; the payload's buffers share memory with `values`."""
        codec = self._codec.last() if is_last else self._codec
        payload: Flat = {}
        quality = Quality()
        sources = tensors(values)
        bases = {} if theta is None else tensors(theta)
        for group, array in values.items():
            if not is_trained(group):
                payload[group] = array
                continue
            arrays = codec.allocate(array.size)
            out = as_rows(codec, tensors(arrays))
            residual = self._array(group, array.size) if self._decay else None
            lag = self._array(_LAG + group, array.size) if self._momentum else None
            for part in blocks(array.size):
                target = sources[group][part]
                base = None
                if theta is not None:
                    base = bases[group][part]
                    target = target - base
                delta = target.float()
                target = delta
                if residual is not None:
                    postponed = residual[part]
                    if is_last and lag is not None:
                        postponed = self._late_effect(postponed, lag[part])
                    target = torch.add(target, postponed, alpha=self._decay)
                decoded = codec.encode_change(target, base, out, part.start)
                difference = target - decoded
                if residual is not None:
                    residual[part] = difference
                if lag is not None:
                    lag[part].mul_(self._momentum).add_(delta).sub_(decoded)
                quality.add_block(target, decoded, difference)
            for name, packed in codec.pack(arrays).items():
                payload[f"{group}/{name}"] = packed
        if not math.isfinite(quality.difference):
            self.residual.clear()  # A damaged result is rejected, and must not damage the next ones.
        return payload, quality

    def _array(self, name: str, elements: int) -> torch.Tensor:
        """Return an array of the residual, which begins as zeros."""
        if name not in self.residual:
            self.residual[name] = np.zeros(elements, np.float32)
        return torch.from_numpy(self.residual[name])

    def _late_effect(self, residual: torch.Tensor, lag: torch.Tensor) -> torch.Tensor:
        """Return what changes the weights in one step as postponed changes would have done in time.

        Outer steps are v ← μv + Δ and θ ← θ + η(Δ + μv). So with time a change Δ moves the weights by ηΔ / (1 − μ),
        but a new one by η(1 + μ)Δ. With e for the encoding error and l for the lacking momentum,
        (e − μ³l) / (1 − μ²) has the effect of all that is left out.
        """
        mu = self._momentum
        return (residual - mu**3 * lag) / (1 - mu**2)


def as_rows(codec: Chunked, arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """View the arrays of a group with one row for each chunk."""
    return {name: arrays[name].view(-1, columns) for name, (_, columns) in codec.arrays.items()}


def advance(codec: Chunked, theta: Flat, payload: Flat, out: Flat | None = None) -> Flat:
    """Add a decoded difference to weights, block by block. Sender and receivers get the same bits.

    `theta`, the weights before, is never written to. Without `out`, new arrays are made.
    """
    if out is None:
        out = {group: np.empty_like(array) for group, array in theta.items()}
    old_weights = tensors(theta)
    encoded = tensors(payload)
    new_weights = tensors(out)
    for group, group_theta in old_weights.items():
        if is_trained(group):
            for part in blocks(len(group_theta)):
                codec.advance_block(encoded, group, part, group_theta[part], new_weights[group][part])
        else:
            new_weights[group].copy_(encoded[group])
    return out


def publish(codec: Chunked, decay: float, theta: Flat, new_theta: Flat, residual: Flat) -> tuple[Flat, Flat]:
    """Encode a step of the global weights, and set the new weights to what receivers decode.

    `theta` are the weights before the step, which all workers have. `new_theta` is overwritten, `residual` is never
    written to.

    Returns:
        The payload, whose buffers share memory with the new weights, and the new residual.

    """
    sender = Feedback(codec, decay)
    sender.residual = {group: array.copy() for group, array in residual.items()}
    payload, _ = sender.encode(new_theta, theta)
    advance(codec, theta, payload, out=new_theta)
    return payload, sender.residual
