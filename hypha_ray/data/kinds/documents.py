"""From documents to a prepared dataset of packed sequences.

 documents ─► shuffle ─┬─► held out ─► pack ────────────► validation slices
                       └─► the rest ─► pack ─► shuffle ─► training slices

A document is in one split only, together with its exact repetitions. Memory is bounded by the sizes below, whatever the
size of the corpus. A corpus that fits in them is shuffled as a whole.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from hypha_ray.data.encoders import DocumentEncoder, Tokens, load_encoder
from hypha_ray.data.kinds.kind import Kind, Report, SliceWriter
from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.documents import documents
from hypha_ray.errors import DataError

SMALL = 0.025
"""Largest size of a small document, as a fraction of the window; small documents are held out before larger ones."""
CUT = 0.05
"""Largest fraction of the window that may be cut off a larger document."""
WINDOW_CHARACTERS = 1 << 26
"""Characters in the buffer in which documents are shuffled; the first buffer gives the validation documents."""
BLOCK_TOKENS = 1 << 24
"""Approximate tokens in a block in which sequences are shuffled."""
BATCH_CHARACTERS = 1 << 20
"""Approximate characters of the documents that are tokenised together."""


def batches(documents: Iterable[str], batch_size: int) -> Iterator[list[str]]:
    """Group documents to `batch_size` characters or slightly more; no document is read ahead."""
    group: list[str] = []
    characters = 0
    for document in documents:
        group.append(document)
        characters += len(document)
        if characters >= batch_size:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def shuffle(documents: Iterable[str], generator: np.random.Generator, buffer_size: int) -> Iterator[str]:
    """Shuffle documents within a buffer of `buffer_size` characters."""
    buffer: list[str] = []
    characters = 0
    for document in documents:
        buffer.append(document)
        characters += len(document)
        while characters > buffer_size:
            chosen_index = int(generator.integers(len(buffer)))
            buffer[chosen_index], buffer[-1] = buffer[-1], buffer[chosen_index]
            characters -= len(buffer[-1])
            yield buffer.pop()
    generator.shuffle(buffer)
    yield from buffer


@dataclass(frozen=True, slots=True)
class ValidationSplit:
    """Sequences held out for validation.

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
) -> ValidationSplit:
    """Remove documents from `window` for validation, each with its repetitions, from the end.

    They amount to `fraction` of the window or `limit` sequences, whichever comes first, and to one sequence at least if
    possible. A document that is large compared with the others is taken only without an alternative, and if the limit
    doesn't cut much off: that part would be lost to both splits. One document and one training sequence remain.
    """
    empty_split = ValidationSplit(np.empty((0, seq_len), np.int32))
    if not (fraction and limit and window):
        return empty_split
    groups = _groups(window)
    choice = _Choice(groups, window, encode, seq_len, limit * seq_len)
    for group in sorted(groups, key=lambda group: group.rank(choice.total_bytes, fraction)):
        available_bytes = choice.total_bytes if choice.is_large(group) else choice.small_bytes
        if choice.is_complete(fraction * available_bytes):
            break
        choice.consider(group, fraction)
    held_out = set[int]()
    for group in choice.chosen:
        held_out.update(group.indices)
    remaining_texts = [text for index, text in enumerate(window) if index not in held_out]
    if choice.tokens < seq_len or not _fills_sequence(remaining_texts, encode, seq_len):
        reason = _why_none(len(groups), limit if choice.passed_over_large else None)
        return replace(empty_split, why_none=reason)
    window[:] = remaining_texts
    sequences = next(pack(choice.parts, seq_len, limit))
    digests = frozenset(group.digest for group in choice.chosen)
    return ValidationSplit(sequences, digests, len(held_out), choice.tokens - sequences.size)


class _Choice:
    """The documents chosen so far.

    Attributes:
        total_bytes: size of all documents.
        small_bytes: size of the small documents.
        bytes: size of the chosen documents.
        tokens: tokens of the chosen documents.
        parts: the same tokens, in one part for each document with its repetitions.
        passed_over_large: whether a document was passed over because the limit would have cut too much off.

    """

    def __init__(
        self,
        groups: Sequence[_Group],
        window: Sequence[str],
        encode: Callable[[list[str]], Tokens],
        seq_len: int,
        most_tokens: int,
    ) -> None:
        self.total_bytes = sum(group.bytes for group in groups)
        self.small_bytes = sum(group.bytes for group in groups if not self.is_large(group))
        self.chosen: list[_Group] = []
        self.parts: list[Tokens] = []
        self.bytes = 0
        self.tokens = 0
        self.passed_over_large = False
        self._documents = len(groups)
        self._window = window
        self._encode = encode
        self._seq_len = seq_len
        self._most_tokens = most_tokens

    def is_large(self, group: _Group) -> bool:
        """Whether a document is large compared with all the others."""
        return group.bytes > SMALL * self.total_bytes

    def is_complete(self, quota_bytes: float) -> bool:
        """Whether the quota is met, or all but one document are chosen."""
        if self.tokens >= self._most_tokens or len(self.chosen) + 1 == self._documents:
            return True
        return self.bytes >= quota_bytes and self.tokens >= self._seq_len

    def consider(self, group: _Group, fraction: float) -> None:
        """Choose a document, unless it is large and there is an alternative."""
        is_large = self.is_large(group)
        exceeds_quota = self.bytes + group.bytes > fraction * self.total_bytes
        if is_large and self.tokens >= self._seq_len and exceeds_quota:
            return
        ids = self._encode([self._window[index] for index in group.indices])
        excess_tokens = self.tokens + len(ids) - self._most_tokens
        if is_large and excess_tokens * group.bytes > CUT * self.total_bytes * len(ids):
            self.passed_over_large = True
            return
        self.chosen.append(group)
        self.parts.append(ids)
        self.bytes += group.bytes
        self.tokens += len(ids)


@dataclass(frozen=True, slots=True)
class _Group:
    """A document and its repetitions: their indices in the window, last first, and their total size."""

    digest: bytes
    indices: tuple[int, ...]
    bytes: int

    def rank(self, total_bytes: int, fraction: float) -> tuple[int, int]:
        """Order in which documents are considered: small and fitting ones as they come, then larger ones by size."""
        if self.bytes <= SMALL * total_bytes:
            return 0, -self.indices[0]
        if self.bytes <= fraction * total_bytes:
            return 1, -self.indices[0]
        return 2, self.bytes


def _groups(window: list[str]) -> list[_Group]:
    indices_by_digest: dict[bytes, list[int]] = {}
    for index in reversed(range(len(window))):
        indices_by_digest.setdefault(digest(window[index]), []).append(index)
    groups = []
    for key, indices in indices_by_digest.items():
        document_bytes = len(window[indices[0]].encode())
        groups.append(_Group(key, tuple(indices), len(indices) * document_bytes))
    return groups


def _fills_sequence(documents: Iterable[str], encode: Callable[[list[str]], Tokens], seq_len: int) -> bool:
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
            stream = np.concatenate(parts)
            packed_length = length - length % full
            yield from stream[:packed_length].reshape(-1, block, seq_len)
            parts = [stream[packed_length:].copy()]
            length -= packed_length
    if length >= seq_len:
        stream = np.concatenate(parts)
        yield stream[: length - length % seq_len].reshape(-1, seq_len)


def write_documents(options: PrepareOptions, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: the source is too small for a training sample.
        HyphaError: source or tokenizer can't be had.

    """
    encoder = load_encoder(options.tokenizer, options.tokenizer_revision, partial(_documents, options))
    if encoder.advice:
        account.note(encoder.advice)
    generator = np.random.default_rng(options.seed)
    source = _of_part(_documents(options, account), options.numbered_part, account)
    window = next(batches(source, WINDOW_CHARACTERS), [])
    generator.shuffle(window)
    limit = options.validation_samples
    fraction = options.validation_fraction if _has_validation(options) else 0.0
    validation = hold_out(window, encoder.encode, options.seq_len, fraction, limit)
    account.leave_out("tokens", "left over from validation documents", validation.cut_tokens)
    shuffled = shuffle(itertools.chain(window, source), generator, WINDOW_CHARACTERS)
    training = _without_repetitions(shuffled, validation, encoder, account)
    for sequences in _sequences(_encoded(training, encoder, report), options, account):
        order = generator.permutation(len(sequences))
        writer.add(_arrays(sequences[order]), "train")
    if not writer.slices:
        raise _too_small(options, account)
    if len(validation.sequences):
        writer.add(_arrays(validation.sequences), "validation")
    elif validation.why_none and _has_validation(options):
        account.note(f"no validation samples: {validation.why_none}")
    if options.max_documents is not None and account.documents >= options.max_documents:
        account.note(f"the source is read up to --max-documents {options.max_documents}")
    writer.tokens = encoder.rules
    return encoder.save(writer.folder)


def _documents(options: PrepareOptions, account: Account | None = None) -> Iterator[str]:
    return itertools.islice(documents(options, account), options.max_documents)


def _has_validation(options: PrepareOptions) -> bool:
    return options.numbered_part is None or options.numbered_part[0] == 0


def _of_part(documents: Iterator[str], part: tuple[int, int] | None, account: Account) -> Iterator[str]:
    """Documents of one part of N; equal documents are in the same part."""
    if part is None:
        yield from documents
        return
    part_number, parts = part
    for document in documents:
        if int.from_bytes(digest(document)[:8]) % parts == part_number:
            yield document
        else:
            account.leave_out("documents", "of other parts")


def _without_repetitions(
    documents: Iterable[str], validation: ValidationSplit, encoder: DocumentEncoder, account: Account
) -> Iterator[str]:
    """Documents without repetitions of validation documents."""
    for document in documents:
        if validation.digests and digest(document) in validation.digests:
            account.leave_out("documents", "repetitions of validation documents")
            account.leave_out("tokens", "of these repetitions", len(encoder.encode([document])))
        else:
            yield document


def _sequences(tokens: Iterable[Tokens], options: PrepareOptions, account: Account) -> Iterator[Tokens]:
    """Blocks of complete slices of training sequences, up to the requested number."""
    slices = max(1, BLOCK_TOKENS // (options.seq_len * options.samples_per_slice))
    samples_left = options.max_samples
    counter = _TokenCounter(tokens)
    packed_tokens = 0
    for block in pack(counter, options.seq_len, slices * options.samples_per_slice):
        yield block[:samples_left]
        packed_tokens += block.size
        if samples_left is None:
            continue
        samples_left -= len(block)
        if samples_left <= 0:
            account.note(f"the source has more: --max-samples {options.max_samples} is reached")
            return
    account.leave_out("tokens", "at the end, less than a sample", counter.tokens - packed_tokens)


class _TokenCounter:
    """Passes tokens on and counts them."""

    def __init__(self, parts: Iterable[Tokens]) -> None:
        self.tokens = 0
        self._parts = parts

    def __iter__(self) -> Iterator[Tokens]:
        for part in self._parts:
            self.tokens += len(part)
            yield part


def _encoded(documents: Iterable[str], encoder: DocumentEncoder, report: Report) -> Iterator[Tokens]:
    for group in batches(documents, BATCH_CHARACTERS):
        yield encoder.encode(group)
        report("documents", len(group))


def _too_small(options: PrepareOptions, account: Account) -> DataError:
    if not account.documents:
        problem = f"there is no text in {options.source}"
        fix = "name another --source, or another --text-column"
        return DataError("DATA033", problem, account.left_out or "an empty source", "text", fix)
    problem = f"{options.source} is too small for one training sample"
    fix = "give more documents, or a smaller --seq-len"
    return DataError("DATA033", problem, account.left_out, f"{options.seq_len} tokens or more", fix)


def _arrays(sequences: Tokens) -> Arrays:
    return {"input_ids": sequences, "attention_mask": np.ones_like(sequences)}


KIND: Final = Kind(write_documents, "language", "the text is")
