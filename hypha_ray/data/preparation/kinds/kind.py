"""Contract of a kind of dataset; kinds that a user brings are functions that return samples.

    function(rows, tokenizer) ──► a mapping of arrays by name for each sample

Rows are mappings of columns. Each sample has the same names, dtypes and shapes. Rows and samples are held in memory as
a whole. With ``input_ids`` the tokenizer is saved beside the slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from hypha_ray.data.manifest import Modality, PreprocessorInfo
from hypha_ray.data.preparation.encoders import require_end, save_tokenizer, token_rules, tokenizer_of
from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.slice_writer import Report, Rows, SliceWriter, split, write_split
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.tables import Column, Row, no_table
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import ConfigError, DataError, HyphaError, reason_of
from hypha_ray.plugins import find, look_beside_the_job

Write: TypeAlias = Callable[[PrepareOptions, SliceWriter, Report, Account], PreprocessorInfo | None]
"""Function that writes the slices of both splits, and the preprocessor beside them; it returns None without one."""
MakeSamples: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Any], Iterable[Mapping[str, Any]]]
"""Function of rows and of a tokenizer, which returns samples."""


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
    return Kind(partial(_write, name, find("dataset_kinds", name)), None, "all columns are")


def _write(
    name: str, function: MakeSamples, options: PrepareOptions, writer: SliceWriter, report: Report, account: Account
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
    tokenizer = tokenizer_of(options, _texts(rows))
    samples = _samples(name, function, rows, tokenizer)
    report("samples", len(samples))
    keys = []
    for sample in samples:
        keys.append(b"".join(map(np.ndarray.tobytes, sample.values())))
    splits = split(keys, options, account, "samples")

    def load(chosen: Rows) -> Arrays:
        arrays: Arrays = {}
        for key in samples[0]:
            arrays[key] = np.stack([samples[row][key] for row in chosen])
        return arrays

    write_split(splits, load, options.samples_per_slice, writer)
    if "input_ids" not in samples[0]:
        return None
    writer.tokens = token_rules(tokenizer, [require_end(tokenizer, options.tokenizer)])
    return save_tokenizer(tokenizer, writer.folder, options.tokenizer, options.tokenizer_revision)


class _RowReader:
    """Reads whole rows of tables."""

    columns: tuple[Column, ...] = ()

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Mapping[str, Any]]:
        """Return the columns of each row."""
        del account
        for _, row in rows:
            yield dict(row)

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[Mapping[str, Any]]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, "rows")


def _texts(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Return all texts of rows, for the vocabulary of a tokenizer of characters."""
    for row in rows:
        for value in row.values():
            if isinstance(value, str):
                yield value


def _samples(
    name: str, function: MakeSamples, rows: Sequence[Mapping[str, Any]], tokenizer: Any
) -> list[dict[str, np.ndarray[Any, Any]]]:
    samples = []
    try:
        for returned in function(rows, tokenizer):
            samples.append({key: np.asarray(returned[key]) for key in sorted(returned)})
    except HyphaError:
        raise
    except Exception as error:  # Code of users may raise anything.
        raise _refused(name, reason_of(error)) from error
    if not samples:
        raise _refused(name, "no sample")
    first = _form(samples[0])
    for number, sample in enumerate(samples):
        if _form(sample) != first:
            raise _refused(name, f"sample {number} with {_form(sample)}, sample 0 with {first}")
    return samples


def _form(sample: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Names, dtypes and shapes of a sample."""
    texts = []
    for key, array in sample.items():
        texts.append(f"{key} {array.dtype} {list(array.shape)}")
    return ", ".join(texts) or "no tensor"


def _refused(name: str, got: str) -> ConfigError:
    allowed = "arrays by name for each sample, of the same dtypes and shapes"
    fix = "see the contract of kinds in docs/plugins-training.md"
    return ConfigError("PREP014", f"--kind {name} makes no samples of the source's rows", got, allowed, fix)
