"""Sparse patches: only those values whose weight has another bfloat16 form afterwards (PULSE, arXiv 2602.03839).

Models compute with weights in bfloat16, so a change that is too small for its 8 bits of mantissa has no effect yet.
With the small learning rates of post-training that holds for nearly all changes of a round. Let b(x) be x rounded to
bfloat16, and θ the weights that both ends have. Let t = Δ + e be the change with what earlier payloads have left out.
Then value i is *visible* if b(θᵢ + tᵢ) ≠ b(θᵢ). Only visible values are sent; error feedback keeps the others, as it
keeps all encoding errors: e ← t − decoded.

Up, the payload of a visible value is the difference b(θᵢ + tᵢ) − θᵢ, in bfloat16, which a server decodes without θ. It
is exact where θᵢ has a bfloat16 form itself, and then mostly a power of two, a unit in the last place. If two thirds of
a block are visible, it is sent as `bf16` sends it: b(t) of all values.

Down, it is the step from the bits of b(θᵢ) to those of b(θᵢ + tᵢ), seen as integers. A receiver's weight becomes
b(θᵢ + tᵢ) itself. So the bfloat16 form of all weights is that of the server's whole ones, θ + t, to the bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.codec.base import Form
from hypha_ray.codec.blocks import BLOCK, blocks
from hypha_ray.codec.formats.chunked import Chunked, Parts
from hypha_ray.codec.formats.floats import NAN_BITS, Bf16
from hypha_ray.codec.streams import deflate, inflate, joined, stream_of_block
from hypha_ray.types import Flat
from hypha_ray.types.layout import dtype_of, is_trained

_MOST_VISIBLE = 2 / 3
"""Share of a block's values above which a patch may take more bytes than all values in bfloat16."""
_NO_END = 255
"""Byte of a gap that goes on in the next byte."""
_HEADER_BYTES = 8

_Codes = npt.NDArray[np.uint16]


class Visible(Bf16):
    """Visible values in bfloat16, zeros elsewhere.

    Each group has ``…/codes``, one stream for each block; ``…/ends``, the end of each stream in bytes; and ``…/size``,
    its number of elements. A stream is empty if no value is visible, or has the codes of all values, two bytes each.
    Otherwise it begins with the number of visible values, and that of the bytes of their gaps, as uint32. Deflated
    follow these gaps, the exponents, and the other bits of the values.
    """

    name = "visible"

    def downward(self) -> Chunked:
        """Return the codec of steps of the global weights, whose receivers have the weights before the step."""
        return VisiblePatch()

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the arrays, with an upper limit of the bytes of the codes: their number is known after encoding."""
        forms = super().form(groups)
        for group, size in groups.items():
            if is_trained(group):
                forms[f"{group}/codes"] = Form("uint8", 2 * size, exact=False)
                forms[f"{group}/ends"] = Form("int64", -(-size // BLOCK))
                forms[f"{group}/size"] = Form("int64", 1)
        return forms

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode the visible values of a block, or all of them if that takes fewer bytes or θ is None."""
        if theta is not None:
            before = theta.float()
            bits = _bits(before + values)
            visible = bits != _bits(before)
            if int(visible.count_nonzero()) <= _MOST_VISIBLE * len(values):
                values = (_of_bits(bits) - before).masked_fill_(~visible, 0)
        return self.encode_block(values, out, start)

    def pack(self, arrays: Flat) -> Flat:
        """Make a stream of each block's codes."""
        codes = arrays["codes"]
        streams = [_stream(codes[part].view(np.uint16)) for part in blocks(codes.size)]
        return joined(streams) | {"size": np.array([codes.size], np.int64)}

    def rows(self, payload: Mapping[str, torch.Tensor], group: str, part: slice) -> Parts:
        """Decode the streams of the blocks that have the elements; if one is damaged, all codes are NaN."""
        codes = _decoded(payload, group, part)
        if codes is None:
            stop = _size(payload, group) if part.stop is None else part.stop
            codes = np.full(stop - (part.start or 0), NAN_BITS, np.uint16)
        return {"codes": torch.from_numpy(codes).unsqueeze(1)}


class VisiblePatch(Visible):
    """Steps from the bits of the weights in bfloat16 to those of the new ones; 0 leaves a weight as it is."""

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode the step from θ, or from zeros, to θ + values."""
        before = torch.zeros_like(values) if theta is None else theta.float()
        bits = _bits(before + values)
        steps = bits - _bits(before)
        out["codes"][start : start + len(values), 0] = _folded(steps).view(torch.uint16)
        return (_of_bits(bits) - before).masked_fill_(steps == 0, 0)

    def advance_block(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, before: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the weights after the step to `out`; NaN if the payload is damaged."""
        codes = _decoded(payload, group, part)
        if codes is None:
            out.fill_(torch.nan)
            return
        steps = _unfolded(torch.from_numpy(codes.view(np.int16)))
        changed = _of_bits(_bits(before.float()) + steps)
        dtype: torch.dtype = getattr(torch, dtype_of(group))
        torch.where(steps != 0, changed.to(dtype), before, out=out)


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 values in bfloat16, as int16, whose differences wrap around."""
    return values.to(torch.bfloat16).view(torch.int16)


def _of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the values of bits from `_bits`, as float32."""
    return bits.view(torch.bfloat16).float()


def _folded(steps: torch.Tensor) -> torch.Tensor:
    """Interleave positive and negative steps, so that short ones of both signs have small codes."""
    return steps << 1 ^ steps >> 15


def _unfolded(codes: torch.Tensor) -> torch.Tensor:
    """Return the steps of codes from `_folded`."""
    return codes >> 1 & 0x7FFF ^ -(codes & 1)


def _stream(codes: _Codes) -> bytes:
    """Encode the codes of a block, of which 0 says nothing."""
    indices = np.flatnonzero(codes.astype(bool))  # Twice as fast as the indices of integers.
    if not indices.size:
        return b""
    if indices.size > _MOST_VISIBLE * codes.size:
        return codes.tobytes()
    visible = codes[indices]
    rotated = visible << 1 | visible >> 15  # All of the exponent is in the upper byte.
    gaps = _gap_bytes(indices)
    upper = (rotated >> 8).astype(np.uint8)
    lower = rotated.astype(np.uint8)
    header = np.array([indices.size, gaps.size], np.uint32)
    planes = (gaps.tobytes(), upper.tobytes(), lower.tobytes())
    stream = header.tobytes() + deflate(*planes, strategy=zlib.Z_RLE)
    return stream if len(stream) < codes.nbytes else codes.tobytes()


def _decoded(payload: Mapping[str, torch.Tensor], group: str, part: slice) -> _Codes | None:
    """Decode the codes of whole blocks; None if one of their streams is damaged."""
    size = _size(payload, group)
    start = part.start or 0
    stop = size if part.stop is None else part.stop
    if stop > size:
        return None
    codes = np.empty(stop - start, np.uint16)
    for block in blocks(codes.size):
        stream = stream_of_block(payload[f"{group}/codes"], payload[f"{group}/ends"], (start + block.start) // BLOCK)
        block_codes = None if stream is None else _codes(stream, block.stop - block.start)
        if block_codes is None:
            return None
        codes[block] = block_codes
    return codes


def _codes(stream: bytes, size: int) -> _Codes | None:
    """Decode the stream of a block of `size` elements; None if it is malformed."""
    if len(stream) == 2 * size:
        return np.frombuffer(stream, np.uint16)
    codes = np.zeros(size, np.uint16)
    if not stream:
        return codes
    patch = _patch(stream, size)
    if patch is None:
        return None
    indices, rotated = patch
    codes[indices] = rotated >> 1 | rotated << 15
    return codes


def _patch(stream: bytes, size: int) -> tuple[npt.NDArray[np.int64], _Codes] | None:
    """Decode the indices of the visible values and their rotated codes; None if the stream is malformed."""
    if len(stream) < _HEADER_BYTES:
        return None
    count, gap_bytes = np.frombuffer(stream[:_HEADER_BYTES], np.uint32).tolist()
    if not 0 < count <= gap_bytes <= 2 * size:
        return None
    planes = inflate(stream[_HEADER_BYTES:], gap_bytes + 2 * count)
    if planes is None:
        return None
    content = np.frombuffer(planes, np.uint8)
    indices = _indices(content[:gap_bytes])
    if indices.size != count or indices[-1] >= size:
        return None
    upper, lower = content[gap_bytes:].reshape(2, count)
    return indices, (upper.astype(np.uint16) << 8 | lower).astype(np.uint16)


def _gap_bytes(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Encode ascending indices by the numbers of elements between them, each as bytes 255 and a last, smaller one."""
    gaps = np.diff(indices, prepend=-1) - 1
    ends = np.cumsum(gaps // _NO_END + 1) - 1
    encoded = np.full(ends[-1] + 1, _NO_END, np.uint8)
    encoded[ends] = gaps % _NO_END
    return encoded


def _indices(encoded: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return the indices that `_gap_bytes` has encoded, or any ascending ones."""
    ends = np.flatnonzero(encoded != _NO_END)
    skipped = np.cumsum(encoded, dtype=np.int64)[ends]
    return skipped + np.arange(ends.size)


def _size(payload: Mapping[str, torch.Tensor], group: str) -> int:
    """Return the number of elements of a group; 0 if it doesn't fit the number of blocks."""
    size = int(payload[f"{group}/size"])
    return size if -(-size // BLOCK) == len(payload[f"{group}/ends"]) else 0
