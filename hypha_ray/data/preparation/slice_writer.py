"""Split of samples in memory, and the writer of slices, which records what is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import ClassInfo, TensorInfo, TokenRules
from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays, describe, merge, write_slice
from hypha_ray.types import SliceInfo

Report: TypeAlias = Callable[[str, int], None]
"""Receives the progress since the last call: ``("documents", 12)`` or ``("samples", 1024)``."""

Rows: TypeAlias = npt.NDArray[np.int64]
"""Indices of samples, [N]."""


class SliceWriter:
    """Writes samples as slices and records them.

    Args:
        folder: folder of the dataset, which preprocessors are saved in too.
        samples_per_slice: samples of a slice.
        report: receives the progress.
        first: number of the first slice.
        written: takes the file of each slice, to move it elsewhere.

    """

    def __init__(
        self,
        folder: Path,
        samples_per_slice: int,
        report: Report,
        first: int = 0,
        written: Callable[[Path], None] = lambda file: None,
    ) -> None:
        self.folder = folder
        self._first = first
        self._written = written
        self.slices: list[SliceInfo] = []
        self.tensors: tuple[TensorInfo, ...] = ()
        self.classes: ClassInfo | None = None
        self.tokens: TokenRules | None = None
        self.hashes: dict[str, str] = {}
        """Hashes of the models that samples depend on, by name in the manifest's options."""
        self._size = samples_per_slice
        self._report = report

    def add(self, arrays: Arrays, split: str) -> None:
        """Write samples; only the last slice may be shorter."""
        samples = len(next(iter(arrays.values())))
        for start in range(0, samples, self._size):
            part = {name: array[start : start + self._size] for name, array in arrays.items()}
            info = write_slice(self.folder, self._first + len(self.slices), split, part)
            self._written(self.folder / info.file)
            _, tensors = describe(part, info.file)
            self.tensors = merge(self.tensors or tensors, tensors, info.file)
            self.slices.append(info)
            self._report("samples", info.samples)


def split(keys: Sequence[bytes], options: PrepareOptions, account: Account, plural: str) -> tuple[Rows, Rows]:
    """Rows for training and for validation, in random order; no two equal samples are in different splits.

    Of the different samples, `validation_fraction` is held out, at least one and at most `validation_samples`. Their
    repetitions are held out in turns, until the limit is reached.

    Args:
        keys: bytes of each sample, equal for equal samples.
        options: fraction, limit, seed, and the most training samples.
        account: records repetitions that are left out.
        plural: noun of the samples in the account.

    """
    generator = np.random.default_rng(options.seed)
    rows_by_key: dict[bytes, list[int]] = {}
    for row in generator.permutation(len(keys)).tolist():
        rows_by_key.setdefault(keys[row], []).append(row)
    groups = list(rows_by_key.values())
    held_out_groups = 0
    if options.validation_fraction and options.validation_samples:
        share = max(1, round(options.validation_fraction * len(groups)))
        held_out_groups = min(share, options.validation_samples, len(groups) - 1)
        if not held_out_groups:
            account.note(f"no validation samples: all {plural} are the same")
    held_out = _alternating(groups[:held_out_groups])
    excess = len(held_out[options.validation_samples :])
    account.leave_out(plural, f"more repetitions of validation {plural}", excess)
    validation = held_out[: options.validation_samples]
    remaining = list(itertools.chain.from_iterable(groups[held_out_groups:]))
    train = generator.permutation(np.array(remaining, np.int64))
    if options.max_samples is not None and len(train) > options.max_samples:
        account.note(f"the source isn't used up: --max-samples {options.max_samples} is reached")
    return train[: options.max_samples], np.array(validation, np.int64)


def _alternating(groups: Sequence[Sequence[int]]) -> list[int]:
    """The first row of each group, then the second row of each, and so on."""
    rows = []
    for turn in itertools.zip_longest(*groups):
        rows += [row for row in turn if row is not None]
    return rows


def write_split(splits: tuple[Rows, Rows], load: Callable[[Rows], Arrays], size: int, writer: SliceWriter) -> None:
    """Write training and validation slices of `size` samples; `load` makes the tensors of one slice at a time."""
    for rows, name in zip(splits, ("train", "validation"), strict=True):
        for start in range(0, len(rows), size):
            writer.add(load(rows[start : start + size]), name)
