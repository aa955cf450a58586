"""From pairs of texts to a prepared dataset for models with encoder and decoder.

Tensors: ``input_ids`` and ``attention_mask``, int32 [N, S], padded to the longest source; ``labels``, int32 [N, T], the
tokens of the target, padded with -100 to the longest. Pairs are held in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import Report, SliceWriter
from hypha_ray.data.preparation.sources.pairs import Pair, pairs
from hypha_ray.data.preparation.splitting import Rows, split, write_split
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
        what, fix = f"there are no pairs in {options.source}", "name another --source, or other columns"
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
    return save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)


def _encoded(
    tokenizer: Any, found: Sequence[Pair], options: Options, report: Report, account: Account
) -> Iterator[Sample]:
    """Tokens of pairs, taken literally; source and target end in the tokenizer's end token, even if cut off."""
    end, most, cut = require_end(tokenizer, options.tokenizer), options.seq_len, 0
    for start in range(0, len(found), _AT_ONCE):
        part = found[start : start + _AT_ONCE]
        sides = (_ids(tokenizer, [pair.source for pair in part]), _ids(tokenizer, text_target=[p.target for p in part]))
        for source, target in zip(*sides, strict=True):
            ended = [ids if ids[-1:] == [end] else [*ids, end] for ids in (source, target)]
            beyond = sum(max(0, len(ids) - most) for ids in ended)
            account.leave_out("tokens", f"behind the first {most} of a text, see --seq-len", beyond)
            cut += beyond > 0
            yield Sample(*(np.array([*ids[: most - 1], end] if len(ids) > most else ids, np.int32) for ids in ended))
        report("pairs", len(part))
    if cut:
        account.note(f"{counted(cut, 'pairs')} cut off at --seq-len {most}")


def _ids(tokenizer: Any, text: list[str] | None = None, text_target: list[str] | None = None) -> list[list[int]]:
    options = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(text, **options) if text_target is None else tokenizer(text_target=text_target, **options)
    found: list[list[int]] = encoded["input_ids"]
    return found


def _padded(rows: Sequence[Tokens], width: int, padding: int) -> Tokens:
    found = np.full((len(rows), width), padding, np.int32)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    return found
