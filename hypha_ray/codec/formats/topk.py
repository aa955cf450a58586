"""The few greatest elements of each chunk, with two bits for each value."""

from __future__ import annotations

from typing import ClassVar

import torch

from hypha_ray.codec.formats.chunked import Chunked, Parts
from hypha_ray.codec.formats.floats import bf16_of_bits, bits_of_bf16

_CHUNK = 4096
_KEPT = 128
_TWELVE = 0xFFF


class TopK(Chunked):
    """128 of 4096 elements, as SparseLoCo sends them (arXiv 2508.15706): 0.445 bits an element. Meant for feedback.

    An element is a 12-bit place in its chunk, a sign, and a bit that tells two magnitudes apart: the means of the kept
    magnitudes above and below their mean.
    """

    name = "topk"
    chunk = _CHUNK
    arrays: ClassVar = {"places": ("uint8", _KEPT * 3 // 2), "codes": ("uint8", _KEPT // 4), "levels": ("uint16", 2)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Find them, and put each at the nearer of two levels."""
        places = values.abs().topk(_KEPT, dim=1, sorted=False).indices.sort(dim=1).values
        kept = values.gather(1, places)
        sizes = kept.abs()
        large = sizes > (sizes / _KEPT).sum(1, keepdim=True)
        levels = bits_of_bf16(torch.stack([_mean(sizes, ~large), _mean(sizes, large)], dim=1))
        codes = large.to(torch.uint8) | (kept < 0).to(torch.uint8) << 1
        four = codes.view(-1, _KEPT // 4, 4)
        packed = four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6
        return {"places": _pack12(places.int()), "codes": packed, "levels": levels}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Put the values in their places, zeros elsewhere; of a place that is named twice the last one counts."""
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
        codes = (parts["codes"].unsqueeze(2) >> shifts & 3).view(-1, _KEPT).long()
        levels = bf16_of_bits(parts["levels"])
        values = torch.cat([levels, -levels], dim=1).gather(1, codes)
        result = torch.zeros(len(values), _CHUNK)
        return result.scatter_(1, _unpack12(parts["places"]), values)


def _mean(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Mean of some values of each row; 0 where there are none."""
    return (torch.where(of, values, 0) / of.sum(1, keepdim=True).clamp_(min=1)).sum(1)


def _pack12(places: torch.Tensor) -> torch.Tensor:
    """Two 12-bit numbers in three bytes."""
    first = places[:, ::2]
    second = places[:, 1::2]
    bytes_ = (first & 255, first >> 8 | (second & 15) << 4, second >> 4)
    return torch.stack(bytes_, dim=2).flatten(1).to(torch.uint8)


def _unpack12(packed: torch.Tensor) -> torch.Tensor:
    low, middle, high = packed.view(len(packed), -1, 3).long().unbind(2)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=2).flatten(1) & _TWELVE
