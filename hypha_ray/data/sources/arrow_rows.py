"""Rows of Parquet files, of Arrow files (IPC files, Feather, streams of `datasets`), and of other tables in that form.

Arrow gives all structs of a column the same fields. A field that a row's struct didn't have is null there:

    [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": 2}}]                         as written
    [{"name": "a", "arguments": {"x": 1, "y": None}}, {"name": "b", "arguments": {"x": None, "y": 2}}]   as read

Fields of structs, and of tables in other forms, are made columns of their own if an option names them.

Values of the type `arrow.json`, such as `Json` features of `datasets`, are JSON texts, which are read here. Errors of
that library become errors with a remedy.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

from hypha_ray.data.provenance import Account
from hypha_ray.data.sources.files import COMPRESSIONS, kind_of
from hypha_ray.data.sources.tables import (
    Column,
    Row,
    list_of,
    outer_columns,
    outer_name,
    require_columns,
    require_unique,
)
from hypha_ray.errors import AuthenticationError, DataError, HubError, HyphaError

Decoder: TypeAlias = Callable[[Any], Any]
"""Reads the JSON texts in a value."""
Batches: TypeAlias = Callable[[list[str]], Iterable[Any]]
"""Function that reads the batches of some columns."""
_BATCH = 1024


def arrow_rows(path: Path, columns: Sequence[Column], account: Account) -> Iterator[Row]:
    """The rows of a Parquet or Arrow file; only the given columns are read, or all if none are given.

    Raises:
        DataError: it is damaged, or lacks a column.

    """
    import pyarrow

    try:
        # Opened here, since Arrow accepts only names in UTF-8.
        with path.open("rb") as stream:
            schema, batches = _opened(stream, kind_of(path))
            outer = outer_columns(columns, schema.names)
            require_columns(str(path), dict.fromkeys(schema.names), outer)
            column_names = list(dict.fromkeys(column.name for column in outer)) or schema.names
            require_unique(str(path), [name for name in schema.names if name in column_names])
            account.drop(name for name in schema.names if name not in column_names)
            row_numbers = itertools.count(1)
            decoders = _json_decoders(schema)
            for batch in batches(column_names):
                for record in batch.to_pylist():
                    yield f"{path}, row {next(row_numbers)}", _decoded(without_nulls(record), decoders)
    except pyarrow.ArrowInvalid as error:
        format_name = "a Parquet file" if kind_of(path) == ".parquet" else "an Arrow file"
        fix = "unpack it first" if path.suffix.lower() in COMPRESSIONS else "copy it afresh"
        raise DataError("DATA031", f"{path} isn't {format_name}", str(error), fix=fix) from None
    except (OverflowError, ValueError) as error:  # For instance a date after the year 9999.
        fix = "write such values as text, or leave their column out"
        raise DataError("DATA031", f"{path} has values that Python lacks", str(error), fix=fix) from None


def _opened(stream: IO[bytes], format_name: str) -> tuple[Any, Batches]:
    """The schema of a file, and a function that reads batches of some columns."""
    import pyarrow
    from pyarrow import parquet

    if format_name == ".parquet":
        file = parquet.ParquetFile(stream)
        return file.schema_arrow, lambda used: file.iter_batches(columns=used, batch_size=_BATCH)
    try:
        table = pyarrow.ipc.open_file(stream)
        batches = map(table.get_batch, range(table.num_record_batches))
    except pyarrow.ArrowInvalid:  # The other form, in which `datasets` saves.
        stream.seek(0)
        table = pyarrow.ipc.open_stream(stream)
        batches = iter(table)
    return table.schema, lambda used: _slices(batches, used)


def _slices(batches: Iterable[Any], column_names: list[str]) -> Iterator[Any]:
    """Some columns of batches, in parts of a bounded length."""
    for batch in batches:
        for begin in range(0, batch.num_rows, _BATCH):
            yield batch.select(column_names).slice(begin, _BATCH)


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose structs in lists have only fields that aren't null; null columns stay."""
    columns = dict(row)
    for name, value in row.items():
        if isinstance(value, list):
            columns[name] = _without_null_fields(value)
    return columns


def with_fields(
    row: Mapping[str, Any], fields: Collection[str], kept_fields: Collection[str] = ()
) -> Mapping[str, Any]:
    """A row with fields such as ``extra_info.index`` or ``answers.text.0`` as columns of their own.

    A table within the row, or its JSON text, gives way to all its fields, unless its column is to be kept.
    """
    for field_name in fields:
        outer = outer_name(field_name, row)
        while outer is not None and outer != field_name:
            inner = _fields_of(row[outer], _names_below(outer, fields))
            if inner is None:
                break
            columns = dict(row)
            if outer not in kept_fields:
                del columns[outer]
            for name, value in inner.items():
                columns[f"{outer}.{name}"] = value
            row = columns
            outer = outer_name(field_name, row.keys() - kept_fields)
    return row


def _names_below(outer: str, fields: Collection[str]) -> list[str]:
    """Names of fields within a column."""
    names: list[str] = []
    for name in fields:
        if name.startswith(f"{outer}."):
            names.append(name.removeprefix(f"{outer}."))
    return names


def _fields_of(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    """All fields of a table, or the items of a list that are named; None if a value has neither."""
    value = list_of(value, "[{")
    if value is None:
        return dict.fromkeys(names)
    if isinstance(value, Mapping):
        return dict(zip(map(str, value), value.values(), strict=True))
    if not isinstance(value, list):
        return None
    items: dict[str, Any] = {}
    for name in names:
        index, _, _ = name.partition(".")
        if not index.isdecimal():
            return None
        items[index] = value[int(index)] if int(index) < len(value) else None
    return items


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


def _json_decoders(fields: Iterable[Any]) -> dict[str, Decoder | None]:
    """The decoder of each field of a schema or a struct, by name."""
    return {field.name: _json_decoder(field.type) for field in fields}


def _json_decoder(column_type: Any) -> Decoder | None:
    """A function that reads the JSON texts in values of an Arrow type; None if there are none."""
    from pyarrow import types

    if getattr(column_type, "extension_name", None) == "arrow.json":
        return _read_json
    if types.is_struct(column_type):
        decoders = _json_decoders(column_type)
        if any(decoders.values()):
            return partial(_decoded, decoders=decoders)
    if types.is_list(column_type) or types.is_large_list(column_type) or types.is_fixed_size_list(column_type):
        decode = _json_decoder(column_type.value_type)
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


def explain(error: Exception, name: str, hint: str) -> HyphaError:
    """The error to raise in place of an error of reading a dataset, by that error and its causes.

    Args:
        error: error that the library raised.
        name: name of a dataset on the hub, or a local folder.
        hint: remedy if there is no such dataset.

    """
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # Of httpx or httpx2, by its version.

    not_found = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)
    missing = (DatasetNotFoundError, *not_found)
    unreachable = (errors.LocalEntryNotFoundError, ConnectionError, TimeoutError, HTTPError)
    chain = list(_chain(error))
    text = " ".join(str(error).split())[:300]
    if "gated" in text or any(_status(link) in (401, 403) for link in chain):
        fix = "check the name; if it is private or gated, ask for access and set HF_TOKEN"
        return AuthenticationError("HUB002", f"the hub refuses access to dataset {name!r}", text, fix=fix)
    if any(isinstance(link, missing) for link in chain):
        return DataError("HUB001", f"there is no dataset {name!r}", text, fix=hint)
    if any(isinstance(link, unreachable) for link in chain):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else text
        problem = f"dataset {name!r} is neither a path nor in the cache, and can't be fetched: offline ({why})"
        fix = f"check the network and HF_HUB_OFFLINE, or fill the cache {constants.HF_HOME}"
        return HubError("HUB003", problem, fix=fix)
    return DataError("HUB004", f"dataset {name!r} can't be read", text, fix="check --subset, --split and --revision")


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
