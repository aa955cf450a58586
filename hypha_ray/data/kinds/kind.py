"""Contract of a kind of dataset, and what kinds share: the split of samples in memory, and the writer of slices.

Kinds that a user brings are functions that return samples.

    function(rows, tokenizer) ──► a mapping of arrays by name for each sample

Rows are mappings of columns. Each sample has the same names, dtypes and shapes. Rows and samples are held in memory as
a whole. With ``input_ids`` the tokenizer is saved beside the slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.encoders import dataset_tokenizer
from hypha_ray.data.manifest import ClassInfo, Modality, PreprocessorInfo, TensorInfo, TokenRules
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays, describe, merge, write_slice
from hypha_ray.data.sources.columns import Column, Row, no_table
from hypha_ray.data.sources.documents import read
from hypha_ray.errors import ConfigError, DataError, HyphaError, reason_of
from hypha_ray.plugins import create, find, look_beside_the_job
from hypha_ray.types import SliceInfo

Report: TypeAlias = Callable[[str, int], None]
"""Receives the progress since the last call: ``("documents", 12)`` or ``("samples", 1024)``."""

Rows: TypeAlias = npt.NDArray[np.int64]
"""Indices of samples, [N]."""
MakeSamples: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Any], Iterable[Mapping[str, Any]]]
"""Function of rows and of a tokenizer, which returns samples."""
_NUMBERS = "biufc"
"""Kinds of dtypes of numpy that are numbers; a slice refuses some of them."""


class SliceWriter:
    """Writes samples as slices and records them.

    Args:
        folder: folder of the dataset, which preprocessors are saved in too.
        samples_per_slice: samples of a slice.
        report: receives the progress.
        first_slice: number of the first slice.
        on_written: takes the file of each slice, to move it elsewhere.

    """

    def __init__(
        self,
        folder: Path,
        samples_per_slice: int,
        report: Report,
        first_slice: int = 0,
        on_written: Callable[[Path], None] = lambda file: None,
    ) -> None:
        self.folder = folder
        self._first = first_slice
        self._written = on_written
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
    excess_rows = len(held_out[options.validation_samples :])
    account.leave_out(plural, f"more repetitions of validation {plural}", excess_rows)
    validation = held_out[: options.validation_samples]
    remaining_rows = list(itertools.chain.from_iterable(groups[held_out_groups:]))
    train = generator.permutation(np.array(remaining_rows, np.int64))
    if options.max_samples is not None and len(train) > options.max_samples:
        account.note(f"the source isn't used up: --max-samples {options.max_samples} is reached")
    return train[: options.max_samples], np.array(validation, np.int64)


def _alternating(groups: Sequence[Sequence[int]]) -> list[int]:
    """The first row of each group, then the second row of each, and so on."""
    rows = []
    for turn in itertools.zip_longest(*groups):
        rows += [row for row in turn if row is not None]
    return rows


def write_split(
    splits: tuple[Rows, Rows], load: Callable[[Rows], Arrays], samples_per_slice: int, writer: SliceWriter
) -> None:
    """Write training and validation slices of so many samples; `load` makes the tensors of one slice at a time."""
    for rows, name in zip(splits, ("train", "validation"), strict=True):
        for start in range(0, len(rows), samples_per_slice):
            writer.add(load(rows[start : start + samples_per_slice]), name)


Write: TypeAlias = Callable[[PrepareOptions, SliceWriter, Report, Account], PreprocessorInfo | None]
"""Function that writes the slices of both splits, and the preprocessor beside them; it returns None without one."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of dataset."""

    write: Write
    modality: Modality | None
    """Modality of the dataset; None: it follows from the tensors."""
    used: str
    """Columns that are used, with a verb, for the account."""


def no_samples(plural: str, options: PrepareOptions, account: Account, fix: str) -> DataError:
    """The error for a source without samples of a kind, such as ``prompts``."""
    problem = f"there are no {plural} in {options.source}"
    return DataError("DATA033", problem, account.left_out or "an empty source", fix=fix)


def own_kind(name: str) -> Kind:
    """Return the kind that a function of a user makes.

    Raises:
        ConfigError: PLG001, PLG002, the function can't be had.

    """
    look_beside_the_job()
    find("dataset_kinds", name)  # What isn't there is refused before the source is read.
    return Kind(partial(_write, name), None, "all columns are")


def _write(
    name: str, options: PrepareOptions, writer: SliceWriter, report: Report, account: Account
) -> PreprocessorInfo | None:
    """Write the slices of both splits, and the tokenizer beside them if the samples have tokens.

    Raises:
        ConfigError: PREP014, the function raises, or returns something else than samples of one shape.
        HyphaError: source or tokenizer can't be had.

    """
    rows = list(islice(read(options, _RowReader(), account), options.max_documents))
    account.documents = len(rows)
    if not rows:
        raise no_samples("rows", options, account, "name another --source")
    tokenizer = dataset_tokenizer(options, _texts(rows))
    samples = _samples(name, rows, tokenizer.base)
    report("samples", len(samples))
    keys = []
    for sample in samples:
        keys.append(b"".join(map(np.ndarray.tobytes, sample.values())))
    splits = split(keys, options, account, "samples")

    def load(chosen_rows: Rows) -> Arrays:
        arrays: Arrays = {}
        for key in samples[0]:
            arrays[key] = np.stack([samples[row][key] for row in chosen_rows])
        return arrays

    write_split(splits, load, options.samples_per_slice, writer)
    if "input_ids" not in samples[0]:
        return None
    writer.tokens = tokenizer.rules([tokenizer.end])
    return tokenizer.save(writer.folder)


class _RowReader:
    """Reads whole rows of tables."""

    columns: tuple[Column, ...] = ()

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Mapping[str, Any]]:
        """Return the columns of each row."""
        del account
        for _, row in rows:
            yield dict(row)

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[Mapping[str, Any]]:
        """Refuse a plain text: it has no columns."""
        del file, is_only_file
        raise no_table(path, "rows")


def _texts(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Return all texts of rows, for the vocabulary of a tokenizer of characters."""
    for row in rows:
        for value in row.values():
            if isinstance(value, str):
                yield value


def _samples(name: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    samples = []
    try:
        make_samples: MakeSamples = create("dataset_kinds", name)
        for returned in make_samples(rows, tokenizer):
            # A generator may fill the same arrays for each sample, so they are copied.
            samples.append({key: np.array(returned[key]) for key in sorted(returned)})
    except HyphaError:
        raise
    except (Exception, SystemExit) as error:  # Code of users may raise anything.
        raise _refused(name, reason_of(error)) from error
    if not samples:
        raise _refused(name, "no sample")
    for key, array in samples[0].items():
        if not isinstance(key, str) or array.dtype.kind not in _NUMBERS:
            raise _refused(name, f"{key!r} of dtype {array.dtype}")
    first_form = _form(samples[0])
    for number, sample in enumerate(samples):
        if _form(sample) != first_form:
            raise _refused(name, f"sample {number} with {_form(sample)}, sample 0 with {first_form}")
    return samples


def _form(sample: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Names, dtypes and shapes of a sample."""
    texts = []
    for key, array in sample.items():
        texts.append(f"{key} {array.dtype} {list(array.shape)}")
    return ", ".join(texts) or "no tensor"


def _refused(name: str, got: str) -> ConfigError:
    allowed = "arrays of numbers by name for each sample, of the same dtypes and shapes"
    fix = "see the contract of kinds in docs/plugins-training.md"
    return ConfigError("PREP014", f"--kind {name} makes no samples of the source's rows", got, allowed, fix)
