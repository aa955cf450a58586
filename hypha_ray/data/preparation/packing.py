"""Streams of documents and tokens: shuffled, held out, cut into sequences. Memory stays bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hypha_ray.data.preparation.encoders import Tokens


def batches(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    """Group documents to `size` characters or slightly more; no document is read ahead."""
    group: list[str] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document)
        if characters >= size:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def shuffle(documents: Iterable[str], generator: np.random.Generator, size: int) -> Iterator[str]:
    """Shuffle documents within a buffer of `size` characters."""
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


SMALL = 0.025
"""Largest fraction of the window that counts as a small document; small ones are held out before larger ones."""
CUT = 0.05
"""Largest fraction of the window that may be cut off a larger document."""


@dataclass(frozen=True, slots=True)
class Held:
    """A validation split.

    `sequences` are ``[N, seq_len]``, and `digests` identify repetitions of its documents. `cut_tokens` counts the
    tokens left over after the last sequence. `why_none` is the reason that there is no sequence; otherwise empty.
    """

    sequences: Tokens
    digests: frozenset[bytes] = frozenset()
    documents: int = 0
    cut_tokens: int = 0
    why_none: str = ""


def hold_out(
    window: list[str], encode: Callable[[list[str]], Tokens], seq_len: int, fraction: float, limit: int
) -> Held:
    """Remove documents from `window` for validation, each with its repetitions, from the end.

    They amount to `fraction` of the window or `limit` sequences, whichever comes first, and to one sequence at least if
    possible. A document that is large compared with the others is taken only without an alternative, and if the limit
    doesn't cut much off: that part would be lost to both splits. One document and one training sequence remain.
    """
    none = Held(np.empty((0, seq_len), np.int32))
    if not (fraction and limit and window):
        return none
    groups = _groups(window)
    choice = _Choice(groups, window, encode, seq_len, limit * seq_len)
    for group in sorted(groups, key=lambda group: group.rank(choice.total, fraction)):
        if choice.enough(fraction * (choice.total if choice.large(group) else choice.small)):
            break
        choice.consider(group, fraction)
    places = {place for group in choice.taken for place in group.places}
    rest = [text for place, text in enumerate(window) if place not in places]
    if choice.tokens < seq_len or not _enough(rest, encode, seq_len):
        return replace(none, why_none=_why_none(len(groups), limit if choice.too_large else None))
    window[:] = rest
    sequences = next(pack(choice.parts, seq_len, limit))
    digests = frozenset(group.digest for group in choice.taken)
    return Held(sequences, digests, len(places), choice.tokens - sequences.size)


class _Choice:
    """The documents taken so far. `total` and `small` are sizes in bytes, of all documents and of the small ones.

    `too_large` says whether a document was passed over because the limit would have cut too much off.
    """

    def __init__(
        self,
        groups: Sequence[_Group],
        window: Sequence[str],
        encode: Callable[[list[str]], Tokens],
        seq_len: int,
        most_tokens: int,
    ) -> None:
        self.total = sum(group.size for group in groups)
        self.small = sum(group.size for group in groups if not self.large(group))
        self.taken: list[_Group] = []
        self.parts: list[Tokens] = []
        self.size = self.tokens = 0
        self.too_large = False
        self._documents = len(groups)
        self._window = window
        self._encode = encode
        self._seq_len = seq_len
        self._most_tokens = most_tokens

    def large(self, group: _Group) -> bool:
        """Whether a document is large compared with all the others."""
        return group.size > SMALL * self.total

    def enough(self, quota: float) -> bool:
        """Whether the quota is met, or all but one document are taken."""
        full = self.tokens >= self._most_tokens or (self.size >= quota and self.tokens >= self._seq_len)
        return full or len(self.taken) + 1 == self._documents

    def consider(self, group: _Group, fraction: float) -> None:
        """Take a document, unless it is large and there is an alternative."""
        large = self.large(group)
        if large and self.tokens >= self._seq_len and self.size + group.size > fraction * self.total:
            return
        ids = self._encode([self._window[place] for place in group.places])
        beyond = self.tokens + len(ids) - self._most_tokens
        if large and beyond * group.size > CUT * self.total * len(ids):
            self.too_large = True
            return
        self.taken.append(group)
        self.parts.append(ids)
        self.size = self.size + group.size
        self.tokens = self.tokens + len(ids)


@dataclass(frozen=True, slots=True)
class _Group:
    """A document and its repetitions: their places in the window, last first, and their total size in bytes."""

    digest: bytes
    places: tuple[int, ...]
    size: int

    def rank(self, total: int, fraction: float) -> tuple[int, int]:
        """Order in which documents are considered: small and fitting ones as they come, then larger ones by size."""
        if self.size <= SMALL * total:
            return 0, -self.places[0]
        return (1, -self.places[0]) if self.size <= fraction * total else (2, self.size)


def _groups(window: list[str]) -> list[_Group]:
    places: dict[bytes, list[int]] = {}
    for place in reversed(range(len(window))):
        places.setdefault(digest(window[place]), []).append(place)
    return [_Group(key, tuple(at), len(at) * len(window[at[0]].encode())) for key, at in places.items()]


def _enough(documents: Iterable[str], encode: Callable[[list[str]], Tokens], seq_len: int) -> bool:
    """Whether documents amount to a sequence; only as many as needed are encoded."""
    tokens = 0
    for document in documents:
        tokens += len(encode([document]))
        if tokens >= seq_len:
            return True
    return False


def _why_none(documents: int, limit: int | None) -> str:
    """Reason that nothing is held out; `limit` is None unless documents were too large for it."""
    if documents == 1:
        return "there is only one document, and documents aren't split"
    if limit is None:
        return "there is too little text for a validation sample besides a training sample"
    return f"a whole document would be held out for {limit} samples of it; raise --validation-samples to allow that"


def digest(document: str) -> bytes:
    """Key of a document, equal for equal texts."""
    return hashlib.blake2b(document.encode(), digest_size=16).digest()


def pack(tokens: Iterable[Tokens], seq_len: int, block: int) -> Iterator[Tokens]:
    """Cut a stream of tokens into blocks of sequences ``[≤ block, seq_len]``.

    All blocks but the last are full. A last part that is shorter than a sequence is dropped.
    """
    parts: list[Tokens] = []
    length = 0
    full = block * seq_len
    for ids in tokens:
        parts.append(ids)
        length += len(ids)
        if length >= full:
            row = np.concatenate(parts)
            whole = length - length % full
            yield from row[:whole].reshape(-1, block, seq_len)
            parts = [row[whole:].copy()]
            length = length - whole
    if length >= seq_len:
        yield np.concatenate(parts)[: length - length % seq_len].reshape(-1, seq_len)
