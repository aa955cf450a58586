"""Split of samples that are held in memory: for prompts, chats and labelled samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.slice_writer import SliceWriter
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays

Rows: TypeAlias = npt.NDArray[np.int64]
"""Indices of samples, [N]."""


def split(keys: Sequence[bytes], options: Options, account: Account, what: str) -> tuple[Rows, Rows]:
    """Rows for training and for validation, in random order; no two equal samples are in different splits.

    Of the different samples, `validation_fraction` is held out, at least one and at most `validation_samples`. Each is
    held out as often as the others, as far as it occurs so often and the limit allows it.

    Args:
        keys: bytes of each sample, equal for equal samples.
        options: fraction, limit, seed, and the most training samples.
        account: records repetitions that are left out.
        what: name of the samples in the account, in the plural.

    """
    generator = np.random.default_rng(options.seed)
    places: dict[bytes, list[int]] = {}
    for row in generator.permutation(len(keys)).tolist():
        places.setdefault(keys[row], []).append(row)
    groups = list(places.values())
    wanted = 0
    if options.validation_fraction and options.validation_samples:
        share = max(1, round(options.validation_fraction * len(groups)))
        wanted = min(share, options.validation_samples, len(groups) - 1)
        if not wanted:
            account.note(f"no validation samples: all {what} are the same")
    turns = itertools.zip_longest(*groups[:wanted])
    held = [row for turn in turns for row in turn if row is not None]
    account.leave_out(what, f"more repetitions of validation {what}", len(held[options.validation_samples :]))
    held = held[: options.validation_samples]
    rest = [row for group in groups[wanted:] for row in group]
    train = generator.permutation(np.array(rest, np.int64))
    if options.max_samples is not None and len(train) > options.max_samples:
        account.note(f"the source isn't used up: --max-samples {options.max_samples} is reached")
    return train[: options.max_samples], np.array(held, np.int64)


def write_split(splits: tuple[Rows, Rows], load: Callable[[Rows], Arrays], size: int, writer: SliceWriter) -> None:
    """Write training and validation slices of `size` samples; `load` makes the tensors of one slice at a time."""
    for rows, name in zip(splits, ("train", "validation"), strict=True):
        for start in range(0, len(rows), size):
            writer.add(load(rows[start : start + size]), name)
