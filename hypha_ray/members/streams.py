"""Streams of bytes for blocks of values: deflated (RFC 1951), or a sparse patch.

The streams of a group are joined in an array, which an untrusted sender may have made.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from hypha_ray.errors import ConfigError
from hypha_ray.kernels import compiled
from hypha_ray.types import Flat

BANDS = 8
"""Number of bands."""
SENT = 1 << 7
"""Mark of an element that is sent, beside its band."""
Codes = npt.NDArray[np.uint16]
"""Values as bits, of which the lowest is the sign."""
Bands = npt.NDArray[np.uint8]
"""Band of each element, below `BANDS`."""
_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.int64]
"""Number of each band."""
_NUMBER_BYTES = 3
"""Bytes of a number in a stream: it is at most the number of bits of the gaps of a block."""
_HEADER_BYTES = (BANDS + 1) * _NUMBER_BYTES
_UNARY = 0.4812
"""Logarithm of the golden ratio: if a gap times its rate exceeds that, another lower bit pays."""
_RAW = -15
_MEMORY = 9
"""Parameters of zlib: no header, and Huffman trees for as many codes at a time as possible."""


def patches() -> ModuleType:
    """Return the compiled loops over the elements of patches.

    Raises:
        ConfigError: COD002.

    """
    module = compiled("patches")
    if module is None:
        fix = "repair numba, or its cache by NUMBA_CACHE_DIR; or choose another sync.codec and sync.downward_codec"
        raise ConfigError("COD002", "the codec visible has loops that numba can't compile here", fix=fix)
    return module


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


def inflate(stream: bytes, size_bytes: int) -> bytes | None:
    """Decode exactly this number of bytes; None if the stream is malformed."""
    reader = zlib.decompressobj(_RAW)
    try:
        content = reader.decompress(stream, size_bytes + 1)
    except zlib.error:
        return None
    if len(content) != size_bytes or not reader.eof or reader.unused_data:
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


def patch_stream(codes: Codes, marks: Bands, least_code: int = 0) -> bytes:
    """Encode the values of a sparse patch of a block, and their positions by Rice codes (Rice, 1979).

    A band is a set of elements that are about as likely to be in a patch. Both ends know the bands. So gaps between the
    values of one are of like lengths: their lower bits are sent as they are, the others as so many zeros and a one.

    Args:
        codes: codes of all elements.
        marks: band of each element, and `SENT` if it is in the patch; if all of a band are, their positions take no
            bits.
        least_code: least code of the patch.

    Returns:
        Number of values in each band, number of upper bits of the gaps, these bits, and the lower bits. Deflated
        follow the signs, the lower bytes and the upper bytes of the values.

    """
    counts = patches().count_marks(marks)
    numbers = counts[SENT : SENT + BANDS]
    gaps = np.empty(codes.size + BANDS, np.int32)
    values = np.empty(codes.size + BANDS, np.uint16)
    patches().collect(marks, codes, _starts(numbers), gaps, values)
    widths = _widths(numbers, counts[:BANDS] + numbers)
    upper, lower, upper_size = patches().write_gaps(gaps, _starts(numbers), numbers, widths)
    header = np.array([*numbers, upper_size], "<u4").view(np.uint8).reshape(-1, 4)[:, :_NUMBER_BYTES]
    ends = _starts(numbers) + numbers
    sent_codes = np.delete(values[: ends[-1] + 1], ends) - np.uint16(least_code)
    gap_bytes: bytes = upper.tobytes() + lower.tobytes()
    return header.tobytes() + gap_bytes + _deflated(sent_codes)


def read_patch(stream: bytes, bands: Bands, least_code: int = 0) -> tuple[Codes, int] | None:
    """Decode the codes of all elements from a result of `patch_stream`, 0 if they aren't in the patch.

    `least_code` is the least code of a patch that hasn't all elements.

    Returns:
        The codes, and the number of elements in the patch; None if the stream is malformed.

    """
    if len(stream) < _HEADER_BYTES:
        return None
    content = np.frombuffer(stream, np.uint8)
    header = np.zeros((BANDS + 1, 4), np.uint8)
    header[:, :_NUMBER_BYTES] = content[:_HEADER_BYTES].reshape(-1, _NUMBER_BYTES)
    numbers = header.view("<u4").ravel()[:BANDS].astype(np.int64)
    upper_size = int(header.view("<u4")[BANDS, 0])
    members = patches().count_marks(bands)[:BANDS]
    if (numbers > members).any():
        return None
    widths = _widths(numbers, members)
    upper_end = _HEADER_BYTES + -(-upper_size // 8)
    lower_size = int(numbers @ widths.clip(0))
    lower_end = upper_end + -(-lower_size // 8)
    if lower_end > len(stream):
        return None
    upper = content[_HEADER_BYTES:upper_end]
    lower = content[upper_end:lower_end]
    count = int(numbers.sum())
    gaps = np.zeros(count, np.int32)
    values = _inflated(stream[lower_end:], count)
    if values is None or not patches().read_gaps(upper, upper_size, lower, numbers, members, widths, gaps):
        return None
    if count < bands.size:
        values += np.uint16(least_code)
    codes = np.zeros(bands.size, np.uint16)
    patches().place(bands, gaps, values, numbers, members, codes)
    return codes, count


def _starts(numbers: _Numbers) -> _Numbers:
    """Return the first index of each band among the values of all; behind a band is room for one more."""
    return np.cumsum(numbers + 1) - numbers - 1


def _widths(numbers: _Numbers, members: _Numbers) -> _Numbers:
    """Return the number of lower bits of each band's gaps; -1 if all or none of its elements are in the patch."""
    widths = np.full(BANDS, -1)
    for band in range(BANDS):
        if 0 < numbers[band] < members[band]:
            widths[band] = _width(int(numbers[band]), int(members[band]))
    return widths


def _width(count: int, size: int) -> int:
    """Return the number of lower bits of a band's gaps: the best if all positions are equally likely."""
    mean_gap = size / count - 0.5
    return max(0, math.frexp(_UNARY * mean_gap)[1])


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
