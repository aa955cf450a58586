"""Four bits an element as a floating-point number without a mantissa: a sign and three bits of exponent."""

from __future__ import annotations

from typing import ClassVar

import torch

from hypha_ray.codec.formats.chunked import Parts
from hypha_ray.codec.formats.floats import bf16_of_bits, bits_of_bf16
from hypha_ray.codec.formats.integers import FourBits, pack4, pairs

_BIAS = 127
_MANTISSA = 23
_ONE_AND_A_HALF = 1 << 22
"""Constants of float32: exponent bias, bits of the mantissa, and the mantissa of 1.5."""
_ZERO = 7
_MAGNITUDES = [*(2.0**-power for power in range(_ZERO)), 0.0]


class E3m0(FourBits):
    """Sign and power of two below the chunk's greatest magnitude, as Streaming DiLoCo sends deltas (arXiv 2501.18512).

    Levels are ±s, ±s/2, … ±s/64 and 0, with a bfloat16 s: 4.016 bits an element.
    """

    name = "e3m0"
    chunk = 1024
    arrays: ClassVar = {"codes": ("uint8", 512), "scales": ("uint16", 1)}
    levels = pairs([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest level: between 2ᵉ and 2ᵉ⁺¹ the border is 1.5 · 2ᵉ, which shows in the bits."""
        scales = bits_of_bf16(values.abs().amax(1, keepdim=True))
        size = bf16_of_bits(scales)
        bits = (values * torch.where(size > 0, 1 / size, 0)).view(torch.int32)
        exponent = (bits & 0x7FFFFFFF).add_(_ONE_AND_A_HALF).bitwise_right_shift_(_MANTISSA)
        below = (_BIAS - exponent).clamp_(0, _ZERO)
        codes = below.add_(bits.bitwise_right_shift(28) & 8).to(torch.uint8)
        return {"codes": pack4(codes), "scales": scales}
