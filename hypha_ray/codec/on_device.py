"""Encoding on the device that trains, so that payloads cross to the host instead of weights.

Payloads are those of `Feedback` to the bit, for codecs that treat each element by itself but for the greatest of its
chunk. The host encodes by `huffman2`, `huffman3` and `topk`: their sums over a chunk have another order on a GPU, and
so have the ties of `topk`. Where a value is no number, its bits may differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from hypha_ray.codec.base import Quality
from hypha_ray.codec.blocks import blocks
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.codec.formats.e3m0 import E3m0
from hypha_ray.codec.formats.floats import Bf16, Fp16
from hypha_ray.codec.formats.integers import Int4, Int8
from hypha_ray.types import Flat

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
