"""16-bit floats."""

from __future__ import annotations

from typing import ClassVar

import torch

from hypha_ray.codec.formats.chunked import Chunked, Parts

NAN_BITS = 0x7FC0
"""Bits of NaN in bfloat16."""


class Bf16(Chunked):
    """bfloat16: 8 bits of mantissa, the range of float32."""

    name = "bf16"
    chunk = 1
    arrays: ClassVar = {"codes": ("uint16", 1)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest."""
        return {"codes": bits_of_bf16(values)}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Widen."""
        return bf16_of_bits(parts["codes"])


class Fp16(Chunked):
    """IEEE half precision: 11 bits of mantissa. Values beyond 65504 become infinite, and such a delta is rejected."""

    name = "fp16"
    chunk = 1
    arrays: ClassVar = {"codes": ("float16", 1)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest."""
        return {"codes": values.to(torch.float16)}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Widen."""
        return parts["codes"].to(torch.float32)


def bits_of_bf16(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of values in bfloat16, as uint16: numpy has no bfloat16."""
    return values.to(torch.bfloat16).view(torch.uint16)


def bf16_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the values of bits from `bits_of_bf16`, as float32."""
    return bits.view(torch.bfloat16).to(torch.float32)
