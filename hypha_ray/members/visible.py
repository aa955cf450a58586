"""Sparse patches: only those values whose weight has another bfloat16 form afterwards (PULSE, arXiv 2602.03839).

Models compute with weights in bfloat16, so a change that is too small for its 8 bits of mantissa has no effect yet.
With the small learning rates of post-training that holds for nearly all changes of a round. Let b(x) be x rounded to
bfloat16, and θ the weights that both ends have. Let t = Δ + e be the change with what earlier payloads have left out.
Then value i is *visible* if b(θᵢ + tᵢ) ≠ b(θᵢ). Only visible values are sent; error feedback keeps the others, as it
keeps all encoding errors: e ← t − decoded.

The payload of a visible value is the step from the bits of b(θᵢ) to those of b(θᵢ + tᵢ), seen as integers: mostly a
unit in the last place. Whether a value is visible depends on the size of its weight. So positions are encoded in bands
of weights of like exponents, which the receiver knows as well.

Down, a receiver's weight becomes b(θᵢ + tᵢ) itself. So the bfloat16 form of all weights is that of the server's whole
ones, θ + t, to the bit. Up, a server decodes the difference b(θᵢ + tᵢ) − θᵢ. If two thirds of a block are visible, it
is sent up as `bf16` sends it: b(t) of all values. So is each block in the last round, with fewer bits, and deflated.

Without a barrier a server no longer has θ. Then the payload of a visible value is that difference in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.codec.base import Form
from hypha_ray.codec.feedback import BLOCK, blocks
from hypha_ray.codec.formats import Bf16
from hypha_ray.codec.formats.chunked import Chunked, Parts
from hypha_ray.members.streams import (
    SENT,
    Bands,
    Codes,
    joined,
    patch_stream,
    patches,
    read_patch,
    stream_of_block,
)
from hypha_ray.types import Flat
from hypha_ray.types.data import dtype_of, is_trained

_MOST_VISIBLE = 2 / 3
"""Share of a block's values above which a patch may take more bytes than all values in bfloat16."""
_LEAST_BIT = 1 << 2
"""Least bit of the values in the last payload of a run, which have 5 of the 7 bits of bfloat16's mantissa."""


class _Block(NamedTuple):
    """Codes of a block, decoded from its stream, and whether they are those of all changes in bfloat16."""

    codes: torch.Tensor
    is_dense: bool


class Visible(Bf16):
    """Visible values in bfloat16, zeros elsewhere.

    Each group has ``…/codes``, one stream for each block; ``…/ends``, the end of each stream in bytes; and ``…/size``,
    its number of elements. A stream is empty if no value is visible. It may have the codes of all values, two bytes
    each, and one byte more if they aren't changes in bfloat16. Otherwise it is one of `patch_stream`.
    """

    name = "visible"
    arrays: ClassVar = {"codes": ("uint16", 1), "marks": ("uint8", 1)}
    _least_code: ClassVar[int] = 0
    """Least code of a visible value, which is subtracted in streams of patches."""

    def upward(self) -> Chunked:
        """Return the codec of deltas, whose receiver has the weights before the round."""
        return VisibleDeltas()

    def downward(self) -> Chunked:
        """Return the codec of steps of the global weights, whose receivers have the weights before the step."""
        return VisiblePatch()

    def form(self, groups: Mapping[str, int]) -> dict[str, Form]:
        """Describe the arrays, with an upper limit of the bytes of the codes: their number is known after encoding."""
        forms: dict[str, Form] = {}
        for group, elements in groups.items():
            if not is_trained(group):
                forms[group] = Form(dtype_of(group), elements)
                continue
            streams = -(-elements // BLOCK)
            forms[f"{group}/codes"] = Form("uint8", 2 * elements + streams, exact=False)
            forms[f"{group}/ends"] = Form("int64", streams)
            forms[f"{group}/size"] = Form("int64", 1)
        return forms

    def compress(self, values: torch.Tensor) -> Parts:
        """Round to the nearest bfloat16, and mark all values as sent."""
        codes = _rotated(_bits(values)).view(torch.uint16)
        return {"codes": codes, "marks": torch.full_like(codes, SENT, dtype=torch.uint8)}

    def expand(self, parts: Parts) -> torch.Tensor:
        """Widen."""
        return _of_bits(_rotated_back(parts["codes"].view(torch.int16)))

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode the visible values of a block, or all of them if that takes fewer bytes or θ is None."""
        if theta is None:
            return self.encode_block(values, out, start)
        old_weights = theta.float()
        new_bits = _bits(old_weights + values)
        steps = new_bits - _bits(old_weights)
        if int(steps.count_nonzero()) > _MOST_VISIBLE * len(values):
            return self.encode_block(values, out, start)
        rows = _rows(out, start, len(values))
        is_visible = steps != 0
        parts = self.compress(torch.where(is_visible, _of_bits(new_bits) - old_weights, 0.0))
        rows["codes"].copy_(parts["codes"])
        rows["marks"].copy_(is_visible.to(torch.uint8) * SENT)
        return self.expand(parts)

    def pack(self, arrays: Flat) -> Flat:
        """Make a stream of each block's codes."""
        codes = arrays["codes"].view(np.uint16)
        marks = arrays["marks"].view(np.uint8)
        streams = [self._stream(codes[part], marks[part]) for part in blocks(codes.size)]
        return joined(streams) | {"size": np.array([codes.size], np.int64)}

    def _stream(self, codes: Codes, marks: Bands) -> bytes:
        count = np.count_nonzero(marks >= SENT)
        if not count:
            return b""
        if count == codes.size:
            return codes.tobytes()
        if count <= _MOST_VISIBLE * codes.size:
            stream = patch_stream(codes, marks, self._least_code)
            if len(stream) < codes.nbytes:
                return stream
        return codes.tobytes() + b"\0"

    def decode(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Decode whole blocks; one whose stream is damaged is NaN."""
        if not is_trained(group):
            return payload[group][part]
        start = part.start or 0
        stop = _size(payload, group) if part.stop is None else part.stop
        dtype: torch.dtype = getattr(torch, dtype_of(group))
        changes = torch.empty(stop - start, dtype=dtype)
        for block in blocks(stop - start):
            block_theta = None if theta is None else theta[block].float()
            elements = slice(start + block.start, start + block.stop)
            changes[block] = self._decoded_change(payload, group, elements, block_theta)
        return changes

    def _decoded_change(
        self, payload: Mapping[str, torch.Tensor], group: str, elements: slice, theta: torch.Tensor | None
    ) -> torch.Tensor:
        """Decode the changes of a block."""
        bands = np.zeros(elements.stop - elements.start, np.uint8)
        block = self._read(payload, group, elements, bands)
        if block is None:
            return torch.full((bands.size,), torch.nan)
        return self.expand({"codes": block.codes.view(torch.uint16)})

    def _read(self, payload: Mapping[str, torch.Tensor], group: str, elements: slice, bands: Bands) -> _Block | None:
        """Read the codes of a block; None if its stream is damaged."""
        if elements.stop > _size(payload, group):
            return None
        stream = stream_of_block(payload[f"{group}/codes"], payload[f"{group}/ends"], elements.start // BLOCK)
        if stream is None:
            return None
        size = bands.size
        if len(stream) - 2 * size in (0, 1):
            codes = np.frombuffer(stream, np.int16, size)
            return _Block(torch.from_numpy(codes.copy()), len(stream) == 2 * size)
        if not stream:
            return _Block(torch.zeros(size, dtype=torch.int16), False)
        patch = read_patch(stream, bands, self._least_code)
        if patch is None:
            return None
        values, count = patch
        return _Block(torch.from_numpy(values.view(np.int16)), count == size)


class VisibleDeltas(Visible):
    """Steps from the bits of the weights in bfloat16 to those of the new ones; or all changes in bfloat16."""

    postpones = True
    _least_code = 1
    _most_visible: ClassVar[float] = _MOST_VISIBLE
    """Share of a block's values above which all changes are sent."""

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode the visible steps of a block, or all changes if that takes fewer bytes or θ is None."""
        if theta is None:
            return self.encode_block(values, out, start)
        old_weights = theta.float()
        new_weights = old_weights + values
        decoded = torch.empty_like(old_weights)
        rows = _rows(out, start, len(values))
        codes = rows["codes"].numpy()
        marks = rows["marks"].numpy()
        visible = patches().encode_steps(_words(old_weights), _words(new_weights), codes, marks, _words(decoded))
        if visible > self._most_visible * len(values):
            return self.encode_block(values, out, start)
        return decoded.sub_(old_weights)

    def _decoded_change(
        self, payload: Mapping[str, torch.Tensor], group: str, elements: slice, theta: torch.Tensor | None
    ) -> torch.Tensor:
        if theta is None:
            return super()._decoded_change(payload, group, elements, None)
        block = self._read(payload, group, elements, _bands(theta))
        if block is None:
            return torch.full((len(theta),), torch.nan)
        if block.is_dense:
            return self.expand({"codes": block.codes.view(torch.uint16)})
        return _after(theta, block.codes).sub_(theta)

    def last(self) -> Chunked:
        """Return the codec of a run's last payload, whose encoding error no later payload can correct."""
        return VisibleLast()


class VisibleLast(VisibleDeltas):
    """All changes in bfloat16 with 5 bits of mantissa, in bands of their weights; read as `VisibleDeltas`."""

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode all changes of a block."""
        rows = _rows(out, start, len(values))
        bits = _bits(values) + _LEAST_BIT // 2 & -_LEAST_BIT
        rows["codes"].copy_(_rotated(bits).view(torch.uint16))
        rows["marks"].fill_(SENT)
        if theta is not None:
            rows["marks"] += torch.from_numpy(_bands(theta.float()))
        return _of_bits(bits)

    def _stream(self, codes: Codes, marks: Bands) -> bytes:
        stream = patch_stream(codes, marks)
        return stream if len(stream) < codes.nbytes else codes.tobytes()


class VisiblePatch(VisibleDeltas):
    """Steps from the bits of the weights in bfloat16 to those of the new ones, whatever their number."""

    _most_visible = 1.0

    def encode_change(
        self, values: torch.Tensor, theta: torch.Tensor | None, out: Mapping[str, torch.Tensor], start: int
    ) -> torch.Tensor:
        """Encode the step from θ, or from zeros, to θ + values."""
        old_weights = torch.zeros_like(values) if theta is None else theta
        return super().encode_change(values, old_weights, out, start)

    def advance_block(
        self, payload: Mapping[str, torch.Tensor], group: str, part: slice, theta: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the weights after the step to `out`; NaN if the payload is damaged."""
        weights = theta.float()
        block = self._read(payload, group, part, _bands(weights))
        if block is None:
            out.fill_(torch.nan)
            return
        out.copy_(_after(weights, block.codes))


def _rows(out: Mapping[str, torch.Tensor], start: int, elements: int) -> dict[str, torch.Tensor]:
    """View the rows of a block in the arrays of its group, 1-D."""
    return {name: array[start : start + elements, 0] for name, array in out.items()}


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 values in bfloat16, as int16, whose differences wrap around."""
    return values.to(torch.bfloat16).view(torch.int16)


def _of_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the values of bits from `_bits`, as float32."""
    return bits.view(torch.bfloat16).float()


def _bands(weights: torch.Tensor) -> Bands:
    """Return the band of each weight: two exponents of bfloat16 each."""
    bands = np.empty(len(weights), np.uint8)
    patches().bands_of(_words(weights), bands)
    return bands


def _words(values: torch.Tensor) -> npt.NDArray[np.uint32]:
    """View the bits of contiguous float32 values."""
    return values.numpy().view(np.uint32)


def _rotated(bits: torch.Tensor) -> torch.Tensor:
    """Move the sign of bits to the lowest bit: all of the exponent is in the upper byte then."""
    return bits << 1 | bits >> 15 & 1


def _rotated_back(codes: torch.Tensor) -> torch.Tensor:
    """Return the bits of codes from `_rotated`."""
    return codes >> 1 & 0x7FFF | codes << 15


def _after(weights: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return float32 weights after the steps of a block."""
    new_weights = torch.empty_like(weights)
    patches().decode_steps(_words(weights), codes.numpy().view(np.uint16), _words(new_weights))
    return new_weights


def _size(payload: Mapping[str, torch.Tensor], group: str) -> int:
    """Return the number of elements of a group; 0 if it doesn't fit the number of blocks."""
    elements = int(payload[f"{group}/size"])
    return elements if -(-elements // BLOCK) == len(payload[f"{group}/ends"]) else 0
