"""From tables with pairs of texts to a prepared dataset for models with encoder and decoder.

Tensors: ``input_ids`` and ``attention_mask``, int32 [N, S], padded to the longest source; ``labels``, int32 [N, T], the
tokens of the target, padded with -100 to the longest. Pairs are held in memory as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np

from hypha_ray.data.encoders import DatasetTokenizer, Tokens, dataset_tokenizer
from hypha_ray.data.kinds.kind import Kind, Report, Rows, SliceWriter, no_samples, split, write_split
from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, amount_text, readable
from hypha_ray.data.slices import Arrays
from hypha_ray.data.sources.columns import Column, Row, complete, no_table, useless_value, without_surrogates
from hypha_ray.data.sources.documents import counted_records, read
from hypha_ray.model.task import IGNORE_INDEX

_AT_ONCE = 1024
"""Pairs that are tokenised at once."""


class Pair(NamedTuple):
    """A text, and the text that is to be made of it."""

    source: str
    target: str


def pairs(options: PrepareOptions, account: Account) -> Iterator[Pair]:
    """The pairs of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    yield from counted_records(read(options, PairReader(options), account), options.max_documents, account)


class PairReader:
    """Reads rows of a table with two texts."""

    def __init__(self, options: PrepareOptions) -> None:
        self._source = Column(str(options.source_column), "--source-column")
        self._target = Column(str(options.target_column), "--target-column")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of both texts."""
        return self._source, self._target

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Pair]:
        """The pairs of rows; those with a blank text are put into the account.

        Raises:
            DataError: a row lacks a column, or has something else than text in it.

        """
        for location, row in complete(rows, self.columns, account):
            source = _text(location, self._source, row[self._source.name])
            target = _text(location, self._target, row[self._target.name])
            if source and target:
                yield Pair(source, target)
            else:
                blank = self._target if source else self._source
                account.leave_out("rows", f"without text in {readable(blank.name)}")

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[Pair]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, f"column {self._source.name!r}")


def _text(location: str, column: Column, value: object) -> str:
    """The text of a column, without halves of surrogate pairs; empty if it is blank."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise useless_value(location, column, type(value).__name__, "text")
    return without_surrogates(value) if value.strip() else ""


class PairSample(NamedTuple):
    """Tokens of source and target."""

    source: Tokens
    target: Tokens


def write_pairs(options: PrepareOptions, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no pairs.
        HyphaError: source or tokenizer can't be had.

    """
    all_pairs = list(pairs(options, account))
    if not all_pairs:
        raise no_samples("pairs", options, account, "name another --source, or other columns")
    tokenizer = dataset_tokenizer(options, itertools.chain.from_iterable(all_pairs))
    tokenizer.require_fast()
    samples = list(_encoded(tokenizer, all_pairs, options, report, account))
    splits = split([sample.source.tobytes() for sample in samples], options, account, "pairs")
    source_length = max(len(sample.source) for sample in samples)
    target_length = max(len(sample.target) for sample in samples)

    def load(rows: Rows) -> Arrays:
        sources = [samples[row].source for row in rows]
        targets = [samples[row].target for row in rows]
        return {
            "input_ids": _padded(sources, source_length, tokenizer.padding),
            "attention_mask": _padded(list(map(np.ones_like, sources)), source_length, 0),
            "labels": _padded(targets, target_length, IGNORE_INDEX),
        }

    write_split(splits, load, options.samples_per_slice, writer)
    writer.tokens = tokenizer.rules([tokenizer.end])
    return tokenizer.save(writer.folder)


def _encoded(
    tokenizer: DatasetTokenizer, all_pairs: Sequence[Pair], options: PrepareOptions, report: Report, account: Account
) -> Iterator[PairSample]:
    """Tokens of pairs, taken literally; source and target end as the tokenizer ends a text, even if cut off."""
    most_tokens = options.seq_len
    cut_pairs = 0
    source_tail = _tail(_ids(tokenizer.base, [""])[0], tokenizer.end)
    target_tail = _tail(_ids(tokenizer.base, text_target=[""])[0], tokenizer.end)
    for start in range(0, len(all_pairs), _AT_ONCE):
        batch = all_pairs[start : start + _AT_ONCE]
        sources = _ids(tokenizer.base, [pair.source for pair in batch])
        targets = _ids(tokenizer.base, text_target=[pair.target for pair in batch])
        for source, target in zip(sources, targets, strict=True):
            source_ids, cut_off_source = _ended(source, source_tail, most_tokens)
            target_ids, cut_off_target = _ended(target, target_tail, most_tokens)
            cut_tokens = cut_off_source + cut_off_target
            account.leave_out("tokens", f"behind the first {most_tokens} of a text, see --seq-len", cut_tokens)
            cut_pairs += cut_tokens > 0
            yield PairSample(source_ids, target_ids)
        report("pairs", len(batch))
    if cut_pairs:
        account.note(f"{amount_text(cut_pairs, 'pairs')} cut off at --seq-len {most_tokens}")


def _ended(ids: list[int], end_ids: list[int], most_tokens: int) -> tuple[Tokens, int]:
    """Tokens of a text, cut off so that they end with the tail, and the number of tokens that were cut off."""
    body = ids[: -len(end_ids)] if ids[-len(end_ids) :] == end_ids else ids
    cut_tokens = max(0, len(body) + len(end_ids) - most_tokens)
    return np.array([*body[: most_tokens - len(end_ids)], *end_ids], np.int32), cut_tokens


def _ids(tokenizer: Any, text: list[str] | None = None, text_target: list[str] | None = None) -> list[list[int]]:
    options = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(text, **options) if text_target is None else tokenizer(text_target=text_target, **options)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _tail(specials: list[int], end: int) -> list[int]:
    """The end token and the tokens that a tokenizer puts behind it, such as mBART's language."""
    if end not in specials:
        return [end]
    from_end = specials[::-1].index(end)
    return specials[-1 - from_end :]


def _padded(rows: Sequence[Tokens], width: int, padding: int) -> Tokens:
    padded_rows = np.full((len(rows), width), padding, np.int32)
    for number, row in enumerate(rows):
        padded_rows[number, : len(row)] = row
    return padded_rows


KIND: Final = Kind(write_pairs, "language", "source and target are")
