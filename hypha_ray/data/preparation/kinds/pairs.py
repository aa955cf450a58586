"""From pairs of texts to a prepared dataset for models with encoder and decoder.

Tensors: ``input_ids`` and ``attention_mask``, int32 [N, S], padded to the longest source; ``labels``, int32 [N, T], the
tokens of the target, padded with -100 to the longest. Pairs are held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hypha_ray.data.manifest import PreprocessorInfo
from hypha_ray.data.preparation.encoders import (
    Tokens,
    padding_of,
    require_end,
    require_fast,
    save_tokenizer,
    tokenizer_of,
)
from hypha_ray.data.preparation.kinds.kind import Kind
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter
from hypha_ray.data.preparation.sources.pairs import Pair, pairs
from hypha_ray.data.preparation.splitting import Rows, split, write_split
from hypha_ray.data.preparation.token_rules import token_rules
from hypha_ray.data.provenance import Account, counted
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError
from hypha_ray.model.tasks.task import IGNORE_INDEX

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
        what = f"there are no pairs in {options.source}"
        fix = "name another --source, or other columns"
        raise DataError("DATA033", what, account.left_out or "an empty source", fix=fix)
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
