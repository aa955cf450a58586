"""Entropy-coded scalar quantization: multiples of a scale, in as few bits as their frequencies allow.

Most multiples are small and get short codes. So the quantization step can be shorter for the same bytes, and an outlier
costs its own long code but makes no other step longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from hypha_ray.codec.base import Form
from hypha_ray.codec.feedback import BLOCK, blocks
from hypha_ray.codec.formats import NAN_BITS, FourBits, bf16_of_bits, bits_of_bf16, multiples, pack4, pairs
from hypha_ray.codec.formats.chunked import Parts
from hypha_ray.members.streams import deflate, inflate, joined, stream_of_block
from hypha_ray.types import Flat
from hypha_ray.types.data import is_trained

_MAX_MULTIPLE = 7
_BLOCK_BYTES = BLOCK // 2
"""Bytes of a block's codes before compression. Two codes share a byte and so a Huffman code: half a bit is possible."""
_STORED_PARTS = _BLOCK_BYTES // 16_000 + 1
_MAX_STREAM_BYTES = _BLOCK_BYTES + 5 * _STORED_PARTS + 16
"""Largest size of a block's stream: zlib stores incompressible parts with five further bytes each."""


def _levels(inward: float) -> torch.Tensor:
    """Return the levels of the codes, in steps: multiples, moved towards zero, where most of their values lie."""
    levels_above = [float(code) - inward for code in range(1, _MAX_MULTIPLE + 1)]
    levels_below = [-level for level in reversed(levels_above)]
    return pairs([0.0, *levels_above, -8.0, *levels_below])


class Huffman(FourBits):
    """Multiples, up to 7, of `step` times the root mean square of 256 elements; of a larger scale if 7 aren't enough.

    Each group has ``…/codes``, a deflate stream of Huffman codes alone (RFC 1951) for each block; ``…/ends``, the end
    of each stream in bytes; and ``…/scales``.
    """

    step: ClassVar[float]
    chunk = 256
    arrays: ClassVar = {"codes": ("uint8", 128), "scales": ("uint16", 1)}

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest multiple."""
        largest = values.abs().amax(1, keepdim=True)
        relative = values / torch.where(largest > 0, largest, 1)
        relative_rms = relative.square_().mean(1, keepdim=True).sqrt_()
        relative_scales = (relative_rms * self.step).clamp_(min=1 / _MAX_MULTIPLE)
        scales = bits_of_bf16(largest * relative_scales)
        codes = multiples(values, bf16_of_bits(scales), _MAX_MULTIPLE).to(torch.uint8)
        return {"codes": pack4(codes.bitwise_and_(15)), "scales": scales}

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the arrays, with an upper limit of the bytes of the codes: their number is known after encoding."""
        forms = super().form(groups)
        for group in filter(is_trained, groups):
            codes = forms[f"{group}/codes"]
            streams = -(-codes.size // _BLOCK_BYTES)
            forms[f"{group}/codes"] = Form("uint8", streams * _MAX_STREAM_BYTES, exact=False)
            forms[f"{group}/ends"] = Form("int64", streams)
        return forms

    def pack(self, arrays: Flat) -> Flat:
        """Make a stream of each block's codes."""
        codes = arrays["codes"]
        streams: list[bytes] = []
        for part in blocks(codes.size, _BLOCK_BYTES):
            streams.append(deflate(codes[part].tobytes()))
        return arrays | joined(streams)

    def rows(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> Parts:
        """Inflate the blocks that have the chunks; if one is damaged, all scales are NaN."""
        scales = payload[f"{group}/scales"].view(-1, 1)
        streams = payload[f"{group}/codes"]
        ends = payload[f"{group}/ends"]
        start = part.start
        stop = len(scales)
        if part.stop is not None:
            stop = min(part.stop, stop)
        block_chunks = BLOCK // self.chunk
        first_block = start // block_chunks
        end_block = -(-stop // block_chunks)
        inflated: list[torch.Tensor] = []
        for block in range(first_block, end_block):
            chunks = min(block_chunks, len(scales) - block * block_chunks)
            byte_count = chunks * self.chunk // 2
            stream = stream_of_block(streams, ends, block)
            codes = None if stream is None else inflate(stream, byte_count)
            if codes is None:
                scales = torch.full_like(scales, NAN_BITS)
                codes = bytes(byte_count)
            inflated.append(torch.frombuffer(bytearray(codes), dtype=torch.uint8))
        first_chunk = first_block * block_chunks
        rows = torch.cat(inflated).view(-1, self.chunk // 2)
        return {"codes": rows[start - first_chunk : stop - first_chunk], "scales": scales[start:stop]}


class Huffman2(Huffman):
    """Steps of 1.5 root mean squares: 1.67 bits for each element if values are Gaussian. Meant for error feedback."""

    name = "huffman2"
    step = 1.5
    levels = _levels(0.16)


class Huffman3(Huffman):
    """Steps of 0.7 root mean squares: 2.7 bits for each element if values are Gaussian."""

    name = "huffman3"
    step = 0.7
    levels = _levels(0.04)
