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

from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.preparation.encoders import (
    Tokens,
    padding_of,
    require_end,
    require_fast,
    save_tokenizer,
    token_rules,
    tokenizer_of,
)
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, Rows, SliceWriter, split, write_split
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.tables import Column, Row, complete, no_table
from hypha_ray.data.provenance import Account, counted, readable
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError
from hypha_ray.model.tasks.task import IGNORE_INDEX


class Pair(NamedTuple):
    """A text, and the text that is to be made of it."""

    source: str
    target: str


def pairs(options: Options, account: Account) -> Iterator[Pair]:
    """The pairs of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    for pair in itertools.islice(read(options, PairReader(options), account), options.max_documents):
        account.documents += 1
        yield pair


class PairReader:
    """Reads rows of a table with two texts."""

    def __init__(self, options: Options) -> None:
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
        for where, row in complete(rows, self.columns, account):
            texts = [_text(where, column, row[column.name]) for column in self.columns]
            if all(texts):
                yield Pair(*texts)
            else:
                account.leave_out("rows", f"without text in {readable(self.columns[texts.index('')].name)}")

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[Pair]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, f"column {self._source.name!r}")


def _text(where: str, column: Column, value: object) -> str:
    """The text of a column, without halves of surrogate pairs; empty if it is blank."""
    if value is None:
        return ""
    if not isinstance(value, str):
        problem = f"{where}: column {column.name!r} is of no use"
        fix = f"name another with {column.flag}"
        raise DataError("DATA031", problem, type(value).__name__, "text", fix)
    return value.encode("utf-8", "replace").decode() if value.strip() else ""


_AT_ONCE = 1024
"""Pairs that are tokenised at once."""


class Sample(NamedTuple):
    """Tokens of source and target."""

    source: Tokens
    target: Tokens


def write_pairs(options: Options, writer: SliceWriter, report: Report, account: Account) -> PreprocessorInfo:
    """Write the slices of both splits, and the tokenizer beside them.

    Raises:
        DataError: there are no pairs.
        HyphaError: source or tokenizer can't be had.

    """
    found = list(pairs(options, account))
    if not found:
        problem = f"there are no pairs in {options.source}"
        fix = "name another --source, or other columns"
        raise DataError("DATA033", problem, account.left_out or "an empty source", fix=fix)
    tokenizer = tokenizer_of(options, (text for pair in found for text in pair))
    require_fast(tokenizer, options.tokenizer)
    samples = list(_encoded(tokenizer, found, options, report, account))
    splits = split([one.source.tobytes() for one in samples], options, account, "pairs")
    padding = padding_of(tokenizer, options.tokenizer)

    def load(rows: Rows) -> Arrays:
        chosen = [samples[row] for row in rows]
        sources = _padded([one.source for one in chosen], widths[0], padding)
        mask = _padded([np.ones_like(one.source) for one in chosen], widths[0], 0)
        targets = _padded([one.target for one in chosen], widths[1], IGNORE_INDEX)
        return {"input_ids": sources, "attention_mask": mask, "labels": targets}

    widths = max(len(one.source) for one in samples), max(len(one.target) for one in samples)
    write_split(splits, load, options.samples_per_slice, writer)
    writer.tokens = token_rules(tokenizer, [require_end(tokenizer, options.tokenizer)])
    return save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)


def _encoded(
    tokenizer: Any, found: Sequence[Pair], options: Options, report: Report, account: Account
) -> Iterator[Sample]:
    """Tokens of pairs, taken literally; source and target end as the tokenizer ends a text, even if cut off."""
    end = require_end(tokenizer, options.tokenizer)
    most = options.seq_len
    cut = 0
    tails = _tail(_ids(tokenizer, [""])[0], end), _tail(_ids(tokenizer, text_target=[""])[0], end)
    for start in range(0, len(found), _AT_ONCE):
        part = found[start : start + _AT_ONCE]
        sides = (_ids(tokenizer, [pair.source for pair in part]), _ids(tokenizer, text_target=[p.target for p in part]))
        for pair in zip(*sides, strict=True):
            bodies = [_without(ids, tail) for ids, tail in zip(pair, tails, strict=True)]
            beyond = sum(max(0, len(ids) + len(tail) - most) for ids, tail in zip(bodies, tails, strict=True))
            account.leave_out("tokens", f"behind the first {most} of a text, see --seq-len", beyond)
            cut += beyond > 0
            ended = ([*ids[: most - len(tail)], *tail] for ids, tail in zip(bodies, tails, strict=True))
            yield Sample(*(np.array(ids, np.int32) for ids in ended))
        report("pairs", len(part))
    if cut:
        account.note(f"{counted(cut, 'pairs')} cut off at --seq-len {most}")


def _ids(tokenizer: Any, text: list[str] | None = None, text_target: list[str] | None = None) -> list[list[int]]:
    options = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(text, **options) if text_target is None else tokenizer(text_target=text_target, **options)
    found: list[list[int]] = encoded["input_ids"]
    return found


def _tail(specials: list[int], end: int) -> list[int]:
    """The end token and what a tokenizer puts behind it, such as mBART's language."""
    return specials[-1 - specials[::-1].index(end) :] if end in specials else [end]


def _without(ids: list[int], tail: list[int]) -> list[int]:
    return ids[: -len(tail)] if ids[-len(tail) :] == tail else ids


def _padded(rows: Sequence[Tokens], width: int, padding: int) -> Tokens:
    found = np.full((len(rows), width), padding, np.int32)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found


KIND: Final = Kind(write_pairs, "language", "source and target are")
