"""Rows of Parquet files, and of other tables in Arrow's form.

Arrow gives all structs of a column the same fields. A field that a row's struct didn't have is null there:

    [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": 2}}]                         as written
    [{"name": "a", "arguments": {"x": 1, "y": None}}, {"name": "b", "arguments": {"x": None, "y": 2}}]   as read
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypha_ray.data.preparation.sources.tables import Column, Row, no_column
from hypha_ray.data.provenance import Account
from hypha_ray.errors import DataError


def parquet_rows(path: Path, columns: Sequence[Column], account: Account) -> Iterator[Row]:
    """The rows of a Parquet file; only the given columns are read, or all if none are given.

    Raises:
        DataError: it is damaged, or lacks a column.

    """
    import pyarrow
    from pyarrow import parquet

    try:
        # Opened here, since Arrow accepts only names in UTF-8.
        with path.open("rb") as stream, parquet.ParquetFile(stream) as file:
            names = file.schema_arrow.names
            wanted = [column.name for column in columns] or names
            if missing := [column for column in columns if column.name not in names]:
                raise no_column(str(path), missing[0], names)
            account.drop(name for name in names if name not in wanted)
            number = itertools.count(1)
            for batch in file.iter_batches(columns=wanted, batch_size=1024):
                yield from ((f"{path}, row {next(number)}", without_nulls(record)) for record in batch.to_pylist())
    except pyarrow.ArrowInvalid as error:
        raise DataError("DATA031", f"{path} isn't a Parquet file", str(error), fix="copy it afresh") from None


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose structs in lists have only fields that aren't null; null columns stay."""
    return {name: _without(value) if isinstance(value, list) else value for name, value in row.items()}


def _without(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        return [_without(inner) for inner in value]
    return value
