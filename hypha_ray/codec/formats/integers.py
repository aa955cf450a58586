"""Values as multiples of a scale that each chunk has: 8 or 4 bits an element."""

from __future__ import annotations

from typing import ClassVar

import torch

from hypha_ray.codec.formats.chunked import Chunked, Parts
from hypha_ray.codec.formats.floats import bf16_of_bits, bits_of_bf16


class Int8(Chunked):
    """Block-wise 8-bit integers (Dettmers et al., arXiv 2110.02861, with even steps): 8.125 bits an element."""

    name = "int8"
    chunk = 256
    arrays: ClassVar = {"codes": ("int8", 256), "scales": ("float32", 1)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest multiple of the greatest magnitude / 127."""
        scales = divided(values.abs().amax(1, keepdim=True), 127)
        return {"codes": multiples(values, scales, 127).to(torch.int8), "scales": scales}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Multiply."""
        return parts["codes"] * parts["scales"]


def pairs(values: list[float]) -> torch.Tensor:
    """For every byte the values of its two 4-bit codes, shape (256, 2)."""
    one = torch.tensor(values)
    return torch.stack([one.repeat(16), one.repeat_interleave(16)], dim=1)


class FourBits(Chunked):
    """Codecs that have a bfloat16 scale for a chunk, and a 4-bit code for one of 16 levels for each element."""

    levels: ClassVar[torch.Tensor]
    """In scales, as `pairs` makes them."""

    def expand(self, parts: Parts) -> torch.Tensor:
        """Look levels up, and multiply by the scale."""
        return look_up4(parts["codes"], self.levels) * bf16_of_bits(parts["scales"])


class Int4(FourBits):
    """4-bit integers with even steps: 4.125 bits an element. The scale is a bfloat16."""

    name = "int4"
    chunk = 128
    arrays: ClassVar = {"codes": ("uint8", 64), "scales": ("uint16", 1)}
    levels = pairs([float(code if code < 8 else code - 16) for code in range(16)])

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest multiple of the greatest magnitude / 7."""
        scales = bits_of_bf16(divided(values.abs().amax(1, keepdim=True), 7))
        codes = multiples(values, bf16_of_bits(scales), 7).to(torch.int8).view(torch.uint8)
        return {"codes": pack4(codes.bitwise_and_(15)), "scales": scales}


def multiples(values: torch.Tensor, scales: torch.Tensor, most: int) -> torch.Tensor:
    """The nearest multiples, as whole floats; 0 where the scale is 0 or no number."""
    inverse = torch.where(scales > 0, 1 / scales, 0)
    return (values * inverse).round_().clamp_(-most, most).nan_to_num_(0.0)


def divided(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide by a number, rounded once on every device: by a plain one a GPU multiplies with its reciprocal."""
    return values / torch.full((), float(divisor), device=values.device)


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """Two 4-bit codes a byte, the first one in the lower half."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def look_up4(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The table's values for packed 4-bit codes, two at a time.

    Args:
        packed: (chunks, n) bytes.
        table: as `pairs` makes it.

    Returns:
        (chunks, 2n) values.

    """
    return torch.nn.functional.embedding(packed.int(), table.to(packed.device)).flatten(1)
