"""Deflate streams (RFC 1951) of the blocks of a group, joined in an array, which an untrusted sender may have made."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from hypha_ray.types import Flat

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
