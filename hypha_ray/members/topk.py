"""Top-k sparsification: the largest elements of each chunk, quantized to two bits."""

from __future__ import annotations

from typing import ClassVar

import torch

from hypha_ray.codec.formats import bf16_of_bits, bits_of_bf16
from hypha_ray.codec.formats.chunked import Chunked, Parts

_CHUNK = 4096
_K = 128
_TWELVE_BITS = 0xFFF


class TopK(Chunked):
    """128 of 4096 elements, as SparseLoCo sends them (arXiv 2508.15706): 0.445 bits for each. Meant for error feedback.

    An element is a 12-bit index into its chunk, a sign, and a bit that chooses one of two magnitudes. These are the
    means of the top-k magnitudes above and below their mean.
    """

    name = "topk"
    chunk = _CHUNK
    arrays: ClassVar = {"places": ("uint8", _K * 3 // 2), "codes": ("uint8", _K // 4), "levels": ("uint16", 2)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Choose the largest elements, and round each to the nearer of two levels."""
        unordered = values.abs().topk(_K, dim=1, sorted=False).indices
        indices = unordered.sort(dim=1).values
        largest = values.gather(1, indices)
        sizes = largest.abs()
        means = (sizes / _K).sum(1, keepdim=True)
        is_large = sizes > means
        levels = torch.stack([_mean(sizes, ~is_large), _mean(sizes, is_large)], dim=1)
        signs = (largest < 0).to(torch.uint8)
        codes = is_large.to(torch.uint8) | signs << 1
        first, second, third, fourth = codes.view(-1, _K // 4, 4).unbind(2)
        packed = first | second << 2 | third << 4 | fourth << 6
        return {"places": _pack12(indices.int()), "codes": packed, "levels": bits_of_bf16(levels)}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Put the values at their indices, zeros elsewhere; if an index is named twice, the last one counts."""
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
        four_codes = parts["codes"].unsqueeze(2) >> shifts & 3
        codes = four_codes.view(-1, _K).long()
        levels = bf16_of_bits(parts["levels"])
        signed_levels = torch.cat([levels, -levels], dim=1)
        values = signed_levels.gather(1, codes)
        chunks = torch.zeros(len(values), _CHUNK)
        return chunks.scatter_(1, _unpack12(parts["places"]), values)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the masked values of each row; 0 if there are none."""
    counts = mask.sum(1, keepdim=True).clamp_(min=1)
    return (torch.where(mask, values, 0) / counts).sum(1)


def _pack12(indices: torch.Tensor) -> torch.Tensor:
    """Pack two 12-bit numbers into three bytes."""
    even_indices = indices[:, ::2]
    second = indices[:, 1::2]
    low = even_indices & 255
    middle = even_indices >> 8 | (second & 15) << 4
    high = second >> 4
    packed = torch.stack([low, middle, high], dim=2)
    return packed.flatten(1).to(torch.uint8)


def _unpack12(packed: torch.Tensor) -> torch.Tensor:
    triples = packed.view(len(packed), -1, 3).long()
    low, middle, high = triples.unbind(2)
    first_index = low | (middle & 15) << 8
    second = middle >> 4 | high << 4
    return torch.stack([first_index, second], dim=2).flatten(1) & _TWELVE_BITS
