"""Streams of the blocks of a group, joined in an array, which an untrusted sender may have made.

They are deflated (RFC 1951), or sparse patches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.types import Flat

BANDS = 8
"""Number of bands."""
Codes = npt.NDArray[np.uint16]
"""Values as bits, of which the lowest is the sign."""
Bands = npt.NDArray[np.uint8]
"""Band of each element, below `BANDS`."""
_Indices = npt.NDArray[np.int64]
_Bits = npt.NDArray[np.uint8]
_NUMBER_BYTES = 3
"""Bytes of a number in a stream: it is at most the number of bits of the gaps of a block."""
_HEADER_BYTES = (BANDS + 1) * _NUMBER_BYTES
_UNARY = 0.4812
"""Logarithm of the golden ratio: if a gap times its rate exceeds that, another lower bit pays."""
_RAW = -15
_MEMORY = 9
"""Parameters of zlib: no header, and Huffman trees for as many codes at a time as possible."""


def deflate(*planes: bytes, strategy: int = zlib.Z_HUFFMAN_ONLY) -> bytes:
    """Compress planes of bytes into one stream, each plane with Huffman codes of its own."""
    writer = zlib.compressobj(zlib.Z_BEST_SPEED, zlib.DEFLATED, _RAW, _MEMORY, strategy)
    stream = bytearray()
    for number, plane in enumerate(planes):
        if number:
            stream += writer.flush(zlib.Z_PARTIAL_FLUSH)
        stream += writer.compress(plane)
    stream += writer.flush()
    return bytes(stream)


def inflate(stream: bytes, size: int) -> bytes | None:
    """Decode exactly `size` bytes; None if the stream is malformed."""
    reader = zlib.decompressobj(_RAW)
    try:
        content = reader.decompress(stream, size + 1)
    except zlib.error:
        return None
    if len(content) != size or not reader.eof or reader.unused_data:
        return None
    return content


def joined(streams: Sequence[bytes]) -> Flat:
    """Join the streams of all blocks: ``codes``, and the end of each stream in bytes, ``ends``."""
    ends = np.cumsum([len(stream) for stream in streams], dtype=np.int64)
    return {"codes": np.frombuffer(b"".join(streams), np.uint8), "ends": ends}


def stream_of_block(codes: torch.Tensor, ends: torch.Tensor, block: int) -> bytes | None:
    """Return the stream of a block; None if its ends aren't within the array."""
    start = int(ends[block - 1]) if block else 0
    end = int(ends[block])
    if not 0 <= start <= end <= len(codes):
        return None
    stream = codes[start:end].numpy()
    return stream.tobytes()


def patch_stream(codes: Codes, sent: npt.NDArray[np.bool_], bands: Bands) -> bytes:
    """Encode the values of a sparse patch of a block, and their positions by Rice codes (Rice, 1979).

    A band is a set of elements that are about as likely to be in a patch. Both ends know the bands. So gaps between the
    values of one are of like lengths: their lower bits are sent as they are, the others as so many zeros and a one.

    Args:
        codes: codes of all elements.
        sent: whether each element is in the patch; if all of a band are, their positions take no bits.
        bands: band of each element.

    Returns:
        Number of values in each band, number of upper bits of the gaps, these bits, and the lower bits. Deflated
        follow the signs, the lower bytes and the upper bytes of the values.

    """
    numbers: list[int] = []
    indices: list[_Indices] = []
    upper_bits: list[_Bits] = []
    lower_bits: list[_Bits] = []
    for band in range(BANDS):
        members = np.flatnonzero(bands == band)
        positions = np.flatnonzero(sent[members])
        numbers.append(positions.size)
        indices.append(members[positions])
        if _has_gaps(positions.size, members.size):
            gaps = np.diff(positions, prepend=-1) - 1
            width = _width(positions.size, members.size)
            upper_bits.append(_unary(gaps >> width))
            lower_bits.append((gaps[:, None] >> np.arange(width) & 1).astype(np.uint8).ravel())
    upper = np.concatenate(upper_bits) if upper_bits else np.empty(0, np.uint8)
    lower = np.concatenate(lower_bits) if lower_bits else np.empty(0, np.uint8)
    header = np.array([*numbers, upper.size], "<u4").view(np.uint8).reshape(-1, 4)[:, :_NUMBER_BYTES]
    gap_bytes = np.packbits(upper).tobytes() + np.packbits(lower).tobytes()
    return header.tobytes() + gap_bytes + _deflated(codes[np.concatenate(indices)])


def read_patch(stream: bytes, bands: Bands) -> tuple[_Indices, Codes] | None:
    """Decode the indices of the elements that `patch_stream` has encoded, and their codes; None if it is malformed."""
    if len(stream) < _HEADER_BYTES:
        return None
    content = np.frombuffer(stream, np.uint8)
    header = np.zeros((BANDS + 1, 4), np.uint8)
    header[:, :_NUMBER_BYTES] = content[:_HEADER_BYTES].reshape(-1, _NUMBER_BYTES)
    *counts, upper_size = header.view("<u4").ravel().tolist()
    members = [np.flatnonzero(bands == band) for band in range(BANDS)]
    upper_end = _HEADER_BYTES + -(-upper_size // 8)
    lower_size = 0
    for count, elements in zip(counts, members, strict=True):
        if count > elements.size:
            return None
        if _has_gaps(count, elements.size):
            lower_size += count * _width(count, elements.size)
    lower_end = upper_end + -(-lower_size // 8)
    if lower_end > len(stream):
        return None
    upper = np.unpackbits(content[_HEADER_BYTES:upper_end], count=upper_size)
    lower = np.unpackbits(content[upper_end:lower_end], count=lower_size)
    indices = _read_indices(upper, lower, counts, members)
    if indices is None:
        return None
    codes = _inflated(stream[lower_end:], indices.size)
    return None if codes is None else (indices, codes)


def _read_indices(upper: _Bits, lower: _Bits, counts: list[int], members: list[_Indices]) -> _Indices | None:
    """Decode the indices of all bands' values; None if they aren't within the block."""
    ends = np.flatnonzero(upper)
    first = 0
    first_bit = 0
    indices: list[_Indices] = []
    for count, elements in zip(counts, members, strict=True):
        if not _has_gaps(count, elements.size):
            indices.append(elements[:count])
            continue
        width = _width(count, elements.size)
        stop = first + count
        band_ends = ends[first:stop]
        if band_ends.size < count:
            return None
        start = ends[first - 1] if first else -1
        gaps = np.diff(band_ends, prepend=start) - 1
        bits = lower[first_bit : first_bit + count * width].reshape(count, width)
        gaps = (gaps << width) + (bits.astype(np.int64) << np.arange(width)).sum(1)
        positions = np.cumsum(gaps + 1) - 1
        if positions[-1] >= elements.size:
            return None
        indices.append(elements[positions])
        first = stop
        first_bit += count * width
    return None if first != ends.size else np.concatenate(indices)


def _has_gaps(count: int, size: int) -> bool:
    """Whether the positions of a band's values are sent: neither all nor none are in the patch."""
    return 0 < count < size


def _width(count: int, size: int) -> int:
    """Return the number of lower bits of a band's gaps: the best if all positions are equally likely."""
    mean_gap = size / count - 0.5
    return max(0, math.frexp(_UNARY * mean_gap)[1])


def _unary(numbers: _Indices) -> _Bits:
    """Encode each number by so many zeros and a one."""
    ends = np.cumsum(numbers + 1) - 1
    bits = np.zeros(ends[-1] + 1, np.uint8)
    bits[ends] = 1
    return bits


def _deflated(values: Codes) -> bytes:
    signs = np.packbits((values & 1).astype(np.uint8))
    lower = (values & 0xFE).astype(np.uint8)
    upper = (values >> 8).astype(np.uint8)
    return deflate(signs.tobytes(), lower.tobytes(), upper.tobytes(), strategy=zlib.Z_RLE)


def _inflated(stream: bytes, count: int) -> Codes | None:
    sign_bytes = -(-count // 8)
    planes = inflate(stream, sign_bytes + 2 * count)
    if planes is None:
        return None
    content = np.frombuffer(planes, np.uint8)
    signs = np.unpackbits(content[:sign_bytes], count=count)
    lower, upper = content[sign_bytes:].reshape(2, count)
    codes = upper.astype(np.uint16) << np.uint16(8)
    codes |= lower | signs
    return codes
