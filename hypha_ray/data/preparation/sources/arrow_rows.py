"""Rows of Parquet files, and of other tables in Arrow's form.

Arrow gives all structs of a column the same fields. A field that a row's struct didn't have is null there:

    [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": 2}}]                         as written
    [{"name": "a", "arguments": {"x": 1, "y": None}}, {"name": "b", "arguments": {"x": None, "y": 2}}]   as read

Values of the type `arrow.json`, such as `Json` features of `datasets`, are JSON texts, which are read here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from hypha_ray.data.preparation.sources.tables import Column, Row, require_columns
from hypha_ray.data.provenance import Account
from hypha_ray.errors import DataError

Decoder: TypeAlias = Callable[[Any], Any]
"""Reads the JSON texts in a value."""


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
            require_columns(str(path), dict.fromkeys(names), columns)
            used = [column.name for column in columns] or names
            account.drop(name for name in names if name not in used)
            number = itertools.count(1)
            decoders = {field.name: _json_decoder(field.type) for field in file.schema_arrow}
            for batch in file.iter_batches(columns=used, batch_size=1024):
                for record in batch.to_pylist():
                    yield f"{path}, row {next(number)}", _decoded(without_nulls(record), decoders)
    except pyarrow.ArrowInvalid as error:
        raise DataError("DATA031", f"{path} isn't a Parquet file", str(error), fix="copy it afresh") from None


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose structs in lists have only fields that aren't null; null columns stay."""
    columns = dict(row)
    for name, value in row.items():
        if isinstance(value, list):
            columns[name] = _without_null_fields(value)
    return columns


def _decoded(row: Any, decoders: Mapping[str, Decoder | None]) -> Any:
    """A row or a struct whose JSON texts are read."""
    if not isinstance(row, Mapping):
        return row
    decoded = dict(row)
    for name in row:
        decode = decoders.get(name)
        if decode is not None:
            decoded[name] = decode(row[name])
    return decoded


def _json_decoder(kind: Any) -> Decoder | None:
    """A function that reads the JSON texts in values of an Arrow type; None if there are none."""
    from pyarrow import types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return _read_json
    if types.is_struct(kind):
        decoders = {field.name: _json_decoder(field.type) for field in kind}
        if any(decoders.values()):
            return partial(_decoded, decoders=decoders)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        decode = _json_decoder(kind.value_type)
        if decode is not None:
            return partial(_decoded_list, decode)
    return None


def _read_json(value: Any) -> Any:
    with suppress(ValueError, TypeError, RecursionError):
        return json.loads(value)
    return value


def _decoded_list(decode: Decoder, values: Any) -> Any:
    if isinstance(values, list):
        return list(map(decode, values))
    return values


def _without_null_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        fields = value.items()
        return {name: _without_null_fields(inner) for name, inner in fields if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        return list(map(_without_null_fields, value))
    return value
