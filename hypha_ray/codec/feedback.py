"""Encoders with error feedback: of deltas, on the host or the training device, and of steps of the global weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch

from hypha_ray.codec.base import Quality
from hypha_ray.codec.blocks import blocks, tensors
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.codec.formats.e3m0 import E3m0
from hypha_ray.codec.formats.floats import Bf16, Fp16
from hypha_ray.codec.formats.integers import Int4, Int8
from hypha_ray.types import Flat
from hypha_ray.types.layout import is_trained


class Feedback:
    """Encodes one fragment's results with error feedback (Karimireddy et al., arXiv 1901.09847).

    What a payload lacks, times a decay, is added to what the next one is to say. So with a decay of 1 all decoded
    payloads and what is left out still add up to all that was to be sent.

    Args:
        codec: what payloads are encoded by.
        decay: part of what was left out that is made up for in the next round; 0: nothing is.

    """

    def __init__(self, codec: Chunked, decay: float) -> None:
        self._codec = codec
        self._decay = decay
        self.residual: Flat = {}
        """Encoding error so far, by group; empty before the first round, and without feedback."""

    def encode(self, values: Flat, theta: Flat | None) -> tuple[Flat, Quality]:
        """See `Encoder.encode`; the payload's buffers share memory with `values`."""
        codec = self._codec
        payload: Flat = {}
        quality = Quality()
        given = tensors(values)
        base = None if theta is None else tensors(theta)
        for group, array in values.items():
            if not is_trained(group):
                payload[group] = array
                continue
            rooms = codec.allocate(array.size)
            out = {name: room.view(-1, codec.arrays[name][1]) for name, room in tensors(rooms).items()}
            residual = self._residual(group, array.size)
            for part in blocks(array.size):
                target = given[group][part]
                if base is not None:
                    target = target - base[group][part]
                target = target.float()
                if residual is not None:
                    target = torch.add(target, residual[part], alpha=self._decay)
                decoded = codec.encode_block(target, out, part.start)
                difference = target - decoded
                if residual is not None:
                    residual[part] = difference
                quality.add_block(target, decoded, difference)
            payload |= {f"{group}/{name}": packed for name, packed in codec.pack(rooms).items()}
        if not math.isfinite(quality.difference):
            self.residual.clear()  # One damaged result is rejected; those after it need not be.
        return payload, quality

    def _residual(self, group: str, size: int) -> torch.Tensor | None:
        if not self._decay:
            return None
        if group not in self.residual:
            self.residual[group] = np.zeros(size, np.float32)
        return torch.from_numpy(self.residual[group])


ELEMENTWISE = (Bf16, Fp16, Int8, Int4, E3m0)
"""Codecs whose payloads are the same on every device."""
BLOCK = 1 << 22
"""Elements that are encoded at a time: enough for a GPU, and little beside a model."""


class Elements(Protocol):
    """A group's elements on the device."""

    size: int

    def block(self, part: slice) -> torch.Tensor:
        """Return some of them, 1-D, which aren't written to."""
        ...


class DeviceFeedback:
    """Encoder of one fragment's parameters on their device, with error feedback as `Feedback`.

    Args:
        codec: one of `ELEMENTWISE`.
        decay: part of what was left out that is made up for in the next round; 0: nothing is.
        room: function that makes memory of the host which the device copies into, from size and dtype.
        block: elements that are encoded at a time, a multiple of the codec's chunk.

    """

    def __init__(
        self, codec: Chunked, decay: float, room: Callable[[int, torch.dtype], torch.Tensor], block: int = BLOCK
    ) -> None:
        self._codec = codec
        self._decay = decay
        self._room = room
        self._block = block
        self._rooms: dict[str, torch.Tensor] = {}
        """Arrays of the payload, which are written anew in each round."""
        self.residual: dict[str, torch.Tensor] = {}
        """Encoding error so far, by group, on the device; empty before the first round, and without feedback."""

    def encode(
        self, values: Mapping[str, Elements], theta: Mapping[str, torch.Tensor], wait: Callable[[], None]
    ) -> tuple[Flat, Quality]:
        """Encode differences of trained groups.

        Args:
            values: the weights.
            theta: the global weights that the round began with, on the same device.
            wait: function that waits for all copies to the host.

        Returns:
            Arrays of these groups for the payload, which the next call overwrites, and how good they are.

        """
        sums: list[torch.Tensor] = []
        payload: dict[str, torch.Tensor] = {}
        for group, elements in values.items():
            forms = self._codec.form({group: elements.size})
            rooms = {name: self._room_of(name, form.size, form.dtype) for name, form in forms.items()}
            out = {name: rooms[f"{group}/{name}"].view(-1, n) for name, (_, n) in self._codec.arrays.items()}
            sums += [self._encode_block(group, elements, theta[group], part, out) for part in self._parts(elements)]
            payload |= rooms
        total = torch.stack(sums).sum(0).tolist() if sums else [0.0] * 4
        wait()
        if not math.isfinite(total[-1]):
            self.residual.clear()  # One damaged result is rejected; those after it need not be.
        return {name: room.numpy() for name, room in payload.items()}, Quality(*total)

    def _parts(self, elements: Elements) -> list[slice]:
        return list(blocks(elements.size, self._block))

    def _room_of(self, name: str, size: int, dtype: str) -> torch.Tensor:
        if name not in self._rooms:
            self._rooms[name] = self._room(size, getattr(torch, dtype))
        return self._rooms[name]

    def _encode_block(
        self, group: str, elements: Elements, theta: torch.Tensor, part: slice, out: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Encode a block; return the sums of `Quality`, on the device."""
        codec = self._codec
        target = (elements.block(part) - theta[part]).float()
        residual = self._residual(group, elements.size, target.device)
        if residual is not None:
            target = torch.add(target, residual[part], alpha=self._decay)
        padded = torch.nn.functional.pad(target, (0, -len(target) % codec.chunk)).view(-1, codec.chunk)
        parts = codec.compress(padded)
        rows = slice(part.start // codec.chunk, part.start // codec.chunk + len(padded))
        for name, array in parts.items():
            out[name][rows].copy_(array, non_blocking=True)
        decoded = codec.expand(parts).view(-1)[: len(target)]
        difference = target - decoded
        if residual is not None:
            residual[part] = difference
        one = target.double()
        other = decoded.double()
        lost = difference.double()
        return torch.stack([one.dot(one), other.dot(other), one.dot(other), lost.dot(lost)])

    def _residual(self, group: str, size: int, device: torch.device) -> torch.Tensor | None:
        if not self._decay:
            return None
        if group not in self.residual:
            self.residual[group] = torch.zeros(size, device=device)
        return self.residual[group]


def encodes_on_device(codec: Chunked | None) -> bool:
    """Whether a codec's payloads are the same on every device."""
    return type(codec) in ELEMENTWISE


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
