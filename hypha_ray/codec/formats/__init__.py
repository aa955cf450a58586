"""Numbers of chunks: in 16-bit floats, or in codes of 8 or 4 bits with a scale for each chunk."""

from __future__ import annotations

from typing import ClassVar

import torch

from hypha_ray.codec.formats.chunked import Chunked, Parts

NAN_BITS = 0x7FC0
"""Bits of NaN in bfloat16."""
_SIGNED = [*range(8), *range(-8, 0)]
"""Integers of the 4-bit codes 0 … 15, in two's complement."""
_BIAS = 127
_MANTISSA = 23
_ONE_AND_A_HALF = 1 << 22
"""Constants of float32: exponent bias, bits of the mantissa, and the mantissa of 1.5."""
_ZERO = 7
"""Code of zero, the smallest magnitude."""
_MAGNITUDES = [2.0**-power for power in range(_ZERO)] + [0.0]
_NEGATED = [-magnitude for magnitude in _MAGNITUDES]


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


class Int8(Chunked):
    """Block-wise 8-bit integers (Dettmers et al., arXiv 2110.02861, with even steps): 8.125 bits for each element."""

    name = "int8"
    chunk = 256
    arrays: ClassVar = {"codes": ("int8", 256), "scales": ("float32", 1)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest multiple of the largest magnitude / 127."""
        largest = values.abs().amax(1, keepdim=True)
        scales = divided(largest, 127)
        return {"codes": multiples(values, scales, 127).to(torch.int8), "scales": scales}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Multiply by the scale."""
        return parts["codes"] * parts["scales"]


def pairs(values: list[float]) -> torch.Tensor:
    """Return for each byte the values of its two 4-bit codes, shape (256, 2)."""
    levels = torch.tensor(values)
    return torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=1)


class FourBits(Chunked):
    """Base class of codecs with a bfloat16 scale for each chunk, and a 4-bit code (16 levels) for each element."""

    levels: ClassVar[torch.Tensor]
    """Levels as multiples of the scale, from `pairs`."""

    def expand(self, parts: Parts) -> torch.Tensor:
        """Look levels up, and multiply by the scale."""
        return look_up4(parts["codes"], self.levels) * bf16_of_bits(parts["scales"])


class Int4(FourBits):
    """4-bit integers with even steps: 4.125 bits for each element. The scale is a bfloat16."""

    name = "int4"
    chunk = 128
    arrays: ClassVar = {"codes": ("uint8", 64), "scales": ("uint16", 1)}
    levels = pairs(list(map(float, _SIGNED)))

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest multiple of the largest magnitude / 7."""
        largest = values.abs().amax(1, keepdim=True)
        scales = bits_of_bf16(divided(largest, 7))
        integers = multiples(values, bf16_of_bits(scales), 7).to(torch.int8)
        codes = integers.view(torch.uint8).bitwise_and_(15)
        return {"codes": pack4(codes), "scales": scales}


class E3m0(FourBits):
    """Sign and power of two below the chunk's largest magnitude, as Streaming DiLoCo sends deltas (arXiv 2501.18512).

    Levels are ±s, ±s/2, … ±s/64 and 0, with a bfloat16 s: 4.016 bits for each element.
    """

    name = "e3m0"
    chunk = 1024
    arrays: ClassVar = {"codes": ("uint8", 512), "scales": ("uint16", 1)}
    levels = pairs(_MAGNITUDES + _NEGATED)

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest level. Between 2ᵉ and 2ᵉ⁺¹ the border is 1.5 · 2ᵉ, so adding to the bits rounds."""
        largest = values.abs().amax(1, keepdim=True)
        scales = bits_of_bf16(largest)
        step_size = bf16_of_bits(scales)
        inverse = torch.where(step_size > 0, 1 / step_size, 0)
        bits = (values * inverse).view(torch.int32)
        magnitude_bits = bits & 0x7FFFFFFF
        exponent = magnitude_bits.add_(_ONE_AND_A_HALF).bitwise_right_shift_(_MANTISSA)
        magnitude_codes = (_BIAS - exponent).clamp_(0, _ZERO)
        sign_bits = bits.bitwise_right_shift(28) & 8
        codes = magnitude_codes.add_(sign_bits).to(torch.uint8)
        return {"codes": pack4(codes), "scales": scales}


def multiples(values: torch.Tensor, scales: torch.Tensor, largest: int) -> torch.Tensor:
    """Return the nearest multiples of the scales, up to ±`largest`, as whole floats; 0 if a scale is 0 or NaN."""
    inverse = torch.where(scales > 0, 1 / scales, 0)
    rounded = (values * inverse).round_()
    return rounded.clamp_(-largest, largest).nan_to_num_(0.0)


def divided(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide by a number with the same rounding on every device.

    A GPU multiplies by the reciprocal of a plain number, which rounds twice.
    """
    return values / torch.full((), float(divisor), device=values.device)


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """Pack two 4-bit codes into each byte, the first one in the lower half."""
    even_codes = codes[:, ::2]
    second = codes[:, 1::2]
    return even_codes | second << 4


def look_up4(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Look up the values of packed 4-bit codes, two at a time by `pairs`: shape (chunks, n) becomes (chunks, 2n).

    Returns:
        Values of shape (chunks, 2n).

    """
    values = torch.nn.functional.embedding(packed.int(), table.to(packed.device))
    return values.flatten(1)
