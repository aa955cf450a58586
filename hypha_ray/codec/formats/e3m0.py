"""4-bit floats without a mantissa: a sign and three bits of exponent for each element."""

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
"""Code of zero, the smallest magnitude."""
_MAGNITUDES = [2.0**-power for power in range(_ZERO)] + [0.0]
_NEGATED = [-magnitude for magnitude in _MAGNITUDES]


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
        size = bf16_of_bits(scales)
        inverse = torch.where(size > 0, 1 / size, 0)
        bits = (values * inverse).view(torch.int32)
        magnitude_bits = bits & 0x7FFFFFFF
        exponent = magnitude_bits.add_(_ONE_AND_A_HALF).bitwise_right_shift_(_MANTISSA)
        magnitude_codes = (_BIAS - exponent).clamp_(0, _ZERO)
        sign_bits = bits.bitwise_right_shift(28) & 8
        codes = magnitude_codes.add_(sign_bits).to(torch.uint8)
        return {"codes": pack4(codes), "scales": scales}
