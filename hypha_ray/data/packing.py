"""Streams of documents and tokens: shuffled, held out, cut into sequences. Memory stays bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hypha_ray.data.encoders import Tokens


def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    """Groups of documents of `size` characters or a little more; no document is read ahead."""
    group: list[str] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document)
        if characters >= size:
            yield group
            group, characters = [], 0
    if group:
        yield group


def shuffle(documents: Iterable[str], generator: np.random.Generator, size: int) -> Iterator[str]:
    """Documents in random order, as far as a buffer of `size` characters allows."""
    buffer: list[str] = []
    characters = 0
    for document in documents:
        buffer.append(document)
        characters += len(document)
        while characters > size:
            chosen = int(generator.integers(len(buffer)))
            buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
            characters -= len(buffer[-1])
            yield buffer.pop()
    generator.shuffle(buffer)
    yield from buffer


def hold_out(
    window: list[str], encode: Callable[[list[str]], Tokens], seq_len: int, fraction: float, limit: int
) -> tuple[Tokens, frozenset[bytes]]:
    """Take documents off the end of `window` for validation.

    They are as many as make up `fraction` of its characters or `limit` sequences, whichever comes first; enough for one
    sequence if that is possible at all. One document is always left.

    Returns:
        Sequences ``[N, seq_len]``, and the digests of the documents, by which repetitions of them are known.

    """
    quota = fraction * sum(map(len, window)) if limit else 0.0
    parts: list[Tokens] = []
    digests: set[bytes] = set()
    characters = tokens = 0
    while quota and len(window) > 1 and tokens < limit * seq_len and (characters < quota or tokens < seq_len):
        document = window.pop()
        parts.append(encode([document]))
        digests.add(digest(document))
        characters, tokens = characters + len(document), tokens + len(parts[-1])
    sequences = next(pack(parts, seq_len, max(limit, 1)), np.empty((0, seq_len), np.int32))
    return sequences, frozenset(digests)


def digest(document: str) -> bytes:
    """What two documents with the same text have in common."""
    return hashlib.blake2b(document.encode(), digest_size=16).digest()


def pack(tokens: Iterable[Tokens], seq_len: int, block: int) -> Iterator[Tokens]:
    """Cut one long row of tokens into blocks of sequences ``[≤ block, seq_len]``.

    All blocks but the last are full. The tail that is shorter than a sequence is dropped.
    """
    parts: list[Tokens] = []
    length, full = 0, block * seq_len
    for ids in tokens:
        parts.append(ids)
        length += len(ids)
        if length >= full:
            row = np.concatenate(parts)
            whole = length - length % full
            yield from row[:whole].reshape(-1, block, seq_len)
            parts, length = [row[whole:].copy()], length - whole
    if length >= seq_len:
        yield np.concatenate(parts)[: length - length % seq_len].reshape(-1, seq_len)
