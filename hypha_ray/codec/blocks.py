"""Arrays in pieces that stay in the processor's caches while everything is done to them."""

from __future__ import annotations

from collections.abc import Iterator

BLOCK = 1 << 18
"""Elements that are worked on at a time: a multiple of every codec's chunk."""


def blocks(size: int, block: int = BLOCK) -> Iterator[slice]:
    """Cut a range of elements into blocks."""
    return (slice(start, min(start + block, size)) for start in range(0, size, block))
