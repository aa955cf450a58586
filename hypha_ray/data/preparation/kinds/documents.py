"""From documents to a prepared dataset of packed sequences.

 documents ─► shuffle ─┬─► held out ─► pack ────────────► validation slices
                       └─► the rest ─► pack ─► shuffle ─► training slices

A document is in one split only, together with its exact repetitions. Memory is bounded by the sizes below, whatever the
size of the corpus. A corpus that fits in them is shuffled as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

import numpy as np

from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.preparation.encoders import DocumentEncoder, Tokens, load_encoder
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.packing import ValidationSplit, batches, digest, hold_out, pack, shuffle
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter
from hypha_ray.data.preparation.sources.documents import documents
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError

WINDOW_CHARACTERS = 1 << 26
"""Characters in the buffer in which documents are shuffled; the first buffer gives the validation documents."""
BLOCK_TOKENS = 1 << 24
"""Approximate tokens in a block in which sequences are shuffled."""
BATCH_CHARACTERS = 1 << 20
"""Approximate characters of the documents that are tokenised together."""


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
    number, parts = part
    for document in documents:
        if int.from_bytes(digest(document)[:8]) % parts == number:
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
    packed = 0
    for block in pack(counter, options.seq_len, slices * options.samples_per_slice):
        yield block[:samples_left]
        packed += block.size
        if samples_left is None:
            continue
        samples_left -= len(block)
        if samples_left <= 0:
            account.note(f"the source has more: --max-samples {options.max_samples} is reached")
            return
    account.leave_out("tokens", "at the end, less than a sample", counter.tokens - packed)


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
