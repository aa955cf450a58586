"""Encoder with error feedback: a codec, and the error of its payloads so far."""

from __future__ import annotations

import math

import numpy as np
import torch

from hypha_ray.codec.base import Quality
from hypha_ray.codec.blocks import blocks
from hypha_ray.codec.formats.chunked import Chunked
from hypha_ray.codec.views import tensors
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
            rooms = codec.rooms(array.size)
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
                quality.take(target, decoded, difference)
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
