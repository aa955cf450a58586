"""Streams of sparse patches: Rice codes of the places of values, band by band, and the values, deflated.

A band is a set of elements that are about as likely to be in a patch. If both ends know the bands, the gaps between
the values of one band are of about the same length, and each band has Rice codes of its own (Rice, 1979): the lower
bits of a gap as they are, and the others as so many zeros and a one.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt

from hypha_ray.codec.streams import deflate, inflate

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


def patch_stream(codes: Codes, sent: npt.NDArray[np.bool_], bands: Bands) -> bytes:
    """Encode values of a block.

    Args:
        codes: codes of all elements.
        sent: whether each element is in the patch; if all of a band are, their places take no bits.
        bands: band of each element.

    Returns:
        Number of values in each band, number of upper bits of the gaps, these bits, lower bits of the gaps; and
        deflated the signs, the lower bytes and the upper bytes of the values.

    """
    numbers: list[int] = []
    indices: list[_Indices] = []
    upper_bits: list[_Bits] = []
    lower_bits: list[_Bits] = []
    for band in range(BANDS):
        members = np.flatnonzero(bands == band)
        places = np.flatnonzero(sent[members])
        numbers.append(places.size)
        indices.append(members[places])
        if _has_gaps(places.size, members.size):
            gaps = np.diff(places, prepend=-1) - 1
            width = _width(places.size, members.size)
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
    sizes = np.bincount(bands, minlength=BANDS).tolist()
    upper_end = _HEADER_BYTES + -(-upper_size // 8)
    lower_size = 0
    for count, size in zip(counts, sizes, strict=True):
        if count > size:
            return None
        if _has_gaps(count, size):
            lower_size += count * _width(count, size)
    lower_end = upper_end + -(-lower_size // 8)
    if lower_end > len(stream):
        return None
    upper = np.unpackbits(content[_HEADER_BYTES:upper_end], count=upper_size)
    lower = np.unpackbits(content[upper_end:lower_end], count=lower_size)
    indices = _read_indices(upper, lower, counts, bands)
    if indices is None:
        return None
    codes = _inflated(stream[lower_end:], indices.size)
    return None if codes is None else (indices, codes)


def _read_indices(upper: _Bits, lower: _Bits, counts: list[int], bands: Bands) -> _Indices | None:
    """Decode the indices of all bands' values; None if they aren't within the block."""
    ends = np.flatnonzero(upper)
    first = 0
    first_bit = 0
    indices: list[_Indices] = []
    for band, count in enumerate(counts):
        members = np.flatnonzero(bands == band)
        if not _has_gaps(count, members.size):
            indices.append(members[:count])
            continue
        width = _width(count, members.size)
        stop = first + count
        band_ends = ends[first:stop]
        if band_ends.size < count:
            return None
        start = ends[first - 1] if first else -1
        gaps = np.diff(band_ends, prepend=start) - 1
        bits = lower[first_bit : first_bit + count * width].reshape(count, width)
        gaps = (gaps << width) + (bits.astype(np.int64) << np.arange(width)).sum(1)
        places = np.cumsum(gaps + 1) - 1
        if places[-1] >= members.size:
            return None
        indices.append(members[places])
        first = stop
        first_bit += count * width
    return None if first != ends.size else np.concatenate(indices)


def _has_gaps(count: int, size: int) -> bool:
    """Whether the places of a band's values are sent: neither all nor none are in the patch."""
    return 0 < count < size


def _width(count: int, size: int) -> int:
    """Return the number of lower bits of a band's gaps: the best if all places are equally likely."""
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
