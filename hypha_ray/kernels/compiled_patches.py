"""Loops over the elements of a block for patches of visible values; see `members.visible` and `members.streams`.

Elements are in bands, and each band's gaps are encoded by themselves. So loops keep a counter for each band.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_BANDS = 8
"""Number of bands."""
_LEAST_EXPONENT = 113
"""Exponent, with its bias, of the lowest band: smaller weights than 2⁻¹² are in it, too."""
_Array = Any
_BYTES = types.Array(types.u1, 1, "C", readonly=True)
_CODES = types.Array(types.u2, 1, "C", readonly=True)
_WORDS = types.Array(types.u4, 1, "C", readonly=True)
_GAPS = types.Array(types.i4, 1, "C", readonly=True)
_NUMBERS = types.Array(types.i8, 1, "C", readonly=True)
_NEW_BYTES = types.Array(types.u1, 1, "C")
_NEW_CODES = types.Array(types.u2, 1, "C")
_NEW_WORDS = types.Array(types.u4, 1, "C")
_NEW_GAPS = types.Array(types.i4, 1, "C")
_NEW_NUMBERS = types.Array(types.i8, 1, "C")
_WRITTEN = types.Tuple((_NEW_BYTES, _NEW_BYTES, types.intp))


@njit(types.u4(types.u4))
def _rounded(word: int) -> Any:
    """Return the bits in bfloat16 of a float32, given as its bits."""
    is_odd = word >> np.uint32(16) & np.uint32(1)
    nearest = word + np.uint32(0x7FFF) + is_odd
    magnitude = word & np.uint32(0x7FFFFFFF)
    is_nan = magnitude > np.uint32(0x7F800000)
    return np.uint32(0x7FC0) if is_nan else nearest >> np.uint32(16)


@njit(types.u1(types.u4))
def _band(bits: int) -> Any:
    """Return the band of a weight in bfloat16: two exponents each."""
    exponent = np.int32(bits >> np.uint32(7) & np.uint32(0xFF))
    band = exponent - np.int32(_LEAST_EXPONENT) >> np.int32(1)
    not_below = max(band, np.int32(0))
    return np.uint8(min(not_below, np.int32(_BANDS - 1)))


@njit(types.void(_WORDS, _NEW_BYTES), nogil=True, cache=True)
def bands_of(weights: _Array, bands: _Array) -> None:
    """Write the band of each weight, whose bits are given."""
    for i in range(weights.size):
        bands[i] = _band(_rounded(weights[i]))


@njit(types.intp(_WORDS, _WORDS, _NEW_CODES, _NEW_BYTES, _NEW_WORDS), nogil=True, cache=True)
def encode_steps(old_weights: _Array, new_weights: _Array, codes: _Array, marks: _Array, decoded: _Array) -> Any:
    """Write the steps between weights in bfloat16 as codes, marks, and the new weights as receivers decode them.

    All words are bits of float32.

    Returns:
        Number of visible values.

    """
    visible = 0
    for i in range(old_weights.size):
        old_bits = _rounded(old_weights[i])
        new_bits = _rounded(new_weights[i])
        step = np.int16(new_bits - old_bits)
        sign = step >> 15
        codes[i] = step << 1 ^ sign
        is_visible = step != 0
        mark = np.uint8(is_visible) << 7
        marks[i] = _band(old_bits) | mark
        decoded[i] = old_weights[i]
        if is_visible:
            decoded[i] = new_bits << np.uint32(16)
        visible += is_visible
    return visible


@njit(types.void(_WORDS, _CODES, _NEW_WORDS), nogil=True, cache=True)
def decode_steps(old_weights: _Array, codes: _Array, new_weights: _Array) -> None:
    """Write the weights after steps; all words are bits of float32."""
    for i in range(old_weights.size):
        code = np.uint32(codes[i])
        is_negative = code & np.uint32(1)
        sign = np.uint32(0) - is_negative
        step = code >> np.uint32(1) ^ sign
        new_bits = _rounded(old_weights[i]) + step
        new_weights[i] = old_weights[i]
        if code:
            new_weights[i] = new_bits << np.uint32(16)


@njit(_NEW_NUMBERS(_BYTES), nogil=True, cache=True)
def count_marks(marks: _Array) -> Any:
    """Return the number of elements with each mark, shape (256,)."""
    counts = np.zeros(256, np.int64)
    odd_bits = np.zeros(256, np.int64)
    for i in range(0, marks.size - 1, 2):
        counts[marks[i]] += 1
        odd_bits[marks[i + 1]] += 1
    if marks.size % 2:
        counts[marks[-1]] += 1
    return counts + odd_bits


@njit(types.void(_BYTES, _CODES, _NEW_NUMBERS, _NEW_GAPS, _NEW_CODES), nogil=True, cache=True)
def collect(marks: _Array, codes: _Array, starts: _Array, gaps: _Array, sent: _Array) -> None:
    """Write the codes of the elements that are sent, band by band, and the gaps before them.

    Args:
        marks: band of each element, and `members.streams.SENT`.
        codes: code of each element.
        starts: first index of each band in the outputs, with room for one more in each band; overwritten.
        gaps: output: number of elements of the band since the last that is sent.
        sent: output: codes.

    """
    run = np.zeros(_BANDS, np.int32)
    for i in range(marks.size):
        mark = marks[i]
        band = mark & (_BANDS - 1)
        position = starts[band]
        gaps[position] = run[band]
        sent[position] = codes[i]
        is_sent = mark >> 7
        starts[band] = position + is_sent
        run[band] = run[band] + 1 & is_sent - 1


@njit(types.void(_BYTES, _GAPS, _CODES, _NUMBERS, _NUMBERS, _NEW_CODES), nogil=True, cache=True)
def place(bands: _Array, gaps: _Array, sent: _Array, numbers: _Array, members: _Array, codes: _Array) -> None:
    """Write the codes of the elements that are sent.

    Args:
        bands: band of each element.
        gaps: gaps before the values of each band, band by band.
        sent: codes of the values.
        numbers: number of values of each band.
        members: number of elements of each band.
        codes: output, shape of `bands`; zeros.

    """
    starts = np.cumsum(members) - members
    elements = np.empty(bands.size, np.int32)
    ends = starts.copy()
    for i in range(bands.size):
        end = ends[bands[i]]
        elements[end] = i
        ends[bands[i]] = end + 1
    value = 0
    for band in range(_BANDS):
        place_in_band = starts[band]
        for _ in range(numbers[band]):
            place_in_band += gaps[value]
            codes[elements[place_in_band]] = sent[value]
            place_in_band += 1
            value += 1


@njit
def _write_bit(packed: _Array, index: int, value: int) -> None:
    """Write a bit, 0 or 1, among zeros; the first one of a byte is its highest."""
    shift = 7 - (index & 7)
    packed[index >> 3] |= value << shift


@njit(_WRITTEN(_GAPS, _NUMBERS, _NUMBERS, _NUMBERS), nogil=True, cache=True)
def write_gaps(gaps: _Array, starts: _Array, numbers: _Array, widths: _Array) -> Any:
    """Encode the gaps of all bands; the first bit of a byte is its highest.

    Args:
        gaps: gaps of all bands.
        starts: first index of each band.
        numbers: number of values of each band.
        widths: number of lower bits of each band's gaps; -1 for bands without bits.

    Returns:
        Upper bits: as many zeros as those of each gap say, and a one. Lower bits of each gap, the lowest first. And
        the number of upper bits.

    """
    upper_bit = 0
    lower_bit = 0
    for band in range(_BANDS):
        if widths[band] >= 0:
            lower_bit += numbers[band] * widths[band]
            for i in range(starts[band], starts[band] + numbers[band]):
                upper_bit += (gaps[i] >> widths[band]) + 1
    upper_size = upper_bit
    upper = np.zeros((upper_bit + 7) // 8, np.uint8)
    lower = np.zeros((lower_bit + 7) // 8, np.uint8)
    upper_bit = 0
    lower_bit = 0
    for band in range(_BANDS):
        if widths[band] >= 0:
            for i in range(starts[band], starts[band] + numbers[band]):
                gap = gaps[i]
                upper_bit += gap >> widths[band]
                _write_bit(upper, upper_bit, 1)
                upper_bit += 1
                for bit in range(widths[band]):
                    _write_bit(lower, lower_bit, gap >> bit & 1)
                    lower_bit += 1
    return upper, lower, upper_size


@njit
def _bit(packed: _Array, index: int) -> Any:
    """Return a bit, 0 or 1; the first one of a byte is its highest."""
    byte = packed[index >> 3]
    shift = 7 - (index & 7)
    return byte >> shift & 1


@njit(types.b1(_BYTES, types.intp, _BYTES, _NUMBERS, _NUMBERS, _NUMBERS, _NEW_GAPS), nogil=True, cache=True)
def read_gaps(
    upper: _Array, upper_size: int, lower: _Array, numbers: _Array, members: _Array, widths: _Array, gaps: _Array
) -> Any:
    """Decode the gaps of all bands from results of `write_gaps`.

    Args:
        upper: upper bits.
        upper_size: number of bits of these.
        lower: lower bits.
        numbers: number of values of each band.
        members: number of elements of each band.
        widths: number of lower bits of each band's gaps; -1 for bands without bits, whose gaps stay as they are.
        gaps: output.

    Returns:
        Whether all gaps are within the bits and all values within their bands.

    """
    upper_bit = 0
    lower_bit = 0
    at = 0
    for band in range(_BANDS):
        end = at + numbers[band]
        position = -1
        while widths[band] >= 0 and at < end:
            first_bit = upper_bit
            while upper_bit < upper_size and not _bit(upper, upper_bit):
                upper_bit += 1
            gap = upper_bit - first_bit << widths[band]
            upper_bit += 1
            for bit in range(widths[band]):
                gap |= _bit(lower, lower_bit) << bit
                lower_bit += 1
            position += gap + 1
            if upper_bit > upper_size or position >= members[band]:
                return False
            gaps[at] = gap
            at += 1
        at = end
    return upper_bit == upper_size
