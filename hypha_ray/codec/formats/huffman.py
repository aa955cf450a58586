"""Multiples of a scale in as few bits as their frequencies allow: entropy-coded scalar quantization.

Most multiples are small ones, and these get short codes. So a step can be shorter for the same bytes, and an outlier
costs its own long code but makes no other step longer.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from hypha_ray.codec.base import Form
from hypha_ray.codec.blocks import BLOCK, blocks
from hypha_ray.codec.formats.chunked import Parts
from hypha_ray.codec.formats.floats import bf16_of_bits, bits_of_bf16
from hypha_ray.codec.formats.integers import FourBits, multiples, pack4, pairs
from hypha_ray.types import Flat
from hypha_ray.types.layout import is_trained

_MOST = 7
_RAW = -15
_MEMORY = 9
"""Parameters of zlib: no header, and trees for as many codes at a time as it can have."""
_BYTES = BLOCK // 2
"""Bytes of a block's codes before compression: two in a byte with one Huffman code, so half a bit each is possible."""
_ROOM = _BYTES + 5 * (_BYTES // 16_000 + 1) + 16
"""Largest size of a block's codes: zlib stores what it can't make smaller, with five bytes for each part of it."""
_NO_NUMBER = 0x7FC0
"""In bfloat16."""


def _levels(inward: float) -> torch.Tensor:
    """Levels of the codes, in steps: multiples, moved towards zero, where most of the values rounded to them lie."""
    above = [float(code) - inward for code in range(1, _MOST + 1)]
    return pairs([0.0, *above, -8.0, *(-level for level in reversed(above))])


class Huffman(FourBits):
    """Multiples, up to 7, of `step` times the root mean square of 256 elements; or of more, where 7 aren't enough.

    For each group there are ``…/codes``, a deflate stream of nothing but Huffman codes (RFC 1951) for each block;
    ``…/ends``, where each stream ends; and ``…/scales``.
    """

    step: ClassVar[float]
    chunk = 256
    arrays: ClassVar = {"codes": ("uint8", 128), "scales": ("uint16", 1)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest multiple."""
        greatest = values.abs().amax(1, keepdim=True)
        typical = (values / torch.where(greatest > 0, greatest, 1)).square_().mean(1, keepdim=True).sqrt_()
        scales = bits_of_bf16(greatest * (typical * self.step).clamp_(min=1 / _MOST))
        codes = multiples(values, bf16_of_bits(scales), _MOST).to(torch.uint8)
        return {"codes": pack4(codes.bitwise_and_(15)), "scales": scales}

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Upper limit of the bytes that the codes take; their number is known only afterwards."""
        found = super().form(groups)
        for group in filter(is_trained, groups):
            streams = -(-found[f"{group}/codes"].size // _BYTES)
            found[f"{group}/codes"] = Form("uint8", streams * _ROOM, exact=False)
            found[f"{group}/ends"] = Form("int64", streams)
        return found

    def pack(self, arrays: Flat) -> Flat:
        """Make a stream of each block's codes."""
        codes = arrays["codes"]
        streams = [_deflated(codes[part].tobytes()) for part in blocks(codes.size, _BYTES)]
        ends = np.cumsum([len(stream) for stream in streams], dtype=np.int64)
        return arrays | {"codes": np.frombuffer(b"".join(streams), np.uint8), "ends": ends}

    def rows(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> Parts:
        """Inflate the blocks that they are in; of a damaged one nothing is a number."""
        scales = payload[f"{group}/scales"].view(-1, 1)
        streams = payload[f"{group}/codes"]
        ends = [0, *payload[f"{group}/ends"].tolist()]
        chunks = BLOCK // self.chunk
        stop = len(scales) if part.stop is None else min(part.stop, len(scales))
        first = part.start // chunks
        last = -(-stop // chunks)
        found: list[torch.Tensor] = []
        for block in range(first, last):
            size = min(chunks, len(scales) - block * chunks) * self.chunk // 2
            codes = _inflated(streams, ends[block], ends[block + 1], size)
            if codes is None:
                scales = torch.full_like(scales, _NO_NUMBER)
                codes = torch.zeros(size, dtype=torch.uint8)
            found.append(codes)
        wanted = slice(part.start - first * chunks, stop - first * chunks)
        return {"codes": torch.cat(found).view(-1, self.chunk // 2)[wanted], "scales": scales[part.start : stop]}


class Huffman2(Huffman):
    """Steps of 1.5 root mean squares: 1.67 bits an element if values are Gaussian. Meant for feedback."""

    name = "huffman2"
    step = 1.5
    levels = _levels(0.16)


class Huffman3(Huffman):
    """Steps of 0.7 root mean squares: 2.7 bits an element if values are Gaussian."""

    name = "huffman3"
    step = 0.7
    levels = _levels(0.04)


def _deflated(codes: bytes) -> bytes:
    writer = zlib.compressobj(zlib.Z_BEST_SPEED, zlib.DEFLATED, _RAW, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    return writer.compress(codes) + writer.flush()


def _inflated(streams: torch.Tensor, start: int, end: int, size: int) -> torch.Tensor | None:
    """So many bytes out of a stream; None if it is no stream of that many."""
    if not 0 <= start <= end <= len(streams):
        return None
    reader = zlib.decompressobj(_RAW)
    try:
        codes = reader.decompress(streams[start:end].numpy().tobytes(), size + 1)
    except zlib.error:
        return None
    whole = len(codes) == size and reader.eof and not reader.unused_data
    return torch.frombuffer(bytearray(codes), dtype=torch.uint8) if whole else None
