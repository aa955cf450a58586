"""Rows of tables in files: JSON, JSON lines, CSV, TSV, Parquet, and Arrow (IPC, Feather, streams of `datasets`).

Values of the type `arrow.json`, such as `Json` features of `datasets`, are JSON texts, which are read here.
"""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.sources.columns import (
    DEFAULT_COLUMN,
    TEXT_FLAG,
    Column,
    Row,
    is_list_of,
    listed,
    no_column,
    outer_columns,
    require_columns,
    require_unique,
    without_nulls,
)
from hypha_ray.data.sources.files import BY_PANDAS, COMPRESSIONS, kind_of, require_rows
from hypha_ray.errors import DataError

JSON = frozenset({".jsonl", ".ndjson", ".json"})
CSV = frozenset({".csv", ".tsv"})

_DELIMITERS = ",;\t|"
_LONGEST_NAME: Final = 80
"""Most characters that a column's name is expected to have; questions of surveys are long."""
_SAMPLE_ROWS = 1000
"""Number of first rows that decide which columns contain text."""
_NO_TEXTS = frozenset({"", "true", "false", "yes", "no", "nan", "null", "none", "na", "n/a"})

Decoder: TypeAlias = Callable[[Any], Any]
"""Reads the JSON texts in a value."""
Batches: TypeAlias = Callable[[list[str]], Iterable[Any]]
"""Function that reads the batches of some columns."""
_BATCH = 1024


def json_rows(file: IO[str], path: Path) -> Iterator[Row]:
    """The objects of a file, one per line; a ``.json`` file may also be one object, or a list of them.

    The list may be the ``data`` of one object.

    Raises:
        DataError: it contains anything else.

    """
    first_number = 1
    first_line = file.readline()
    while first_line and not first_line.strip():
        first_number += 1
        first_line = file.readline()
    if kind_of(path) == ".json" and not _is_row(first_line):
        document = _parsed(first_line + file.read(), str(path))
        records = _records(document)
        if records == [document]:
            require_rows(document, path)
        for number, record in enumerate(records, 1):
            yield _row(record, f"{path}, object {number}")
        return
    second_line = file.readline()
    if first_line.strip() and not second_line.strip():
        require_rows(_parsed(first_line, f"{path}, line {first_number}"), path)
    for line_number, line in enumerate(itertools.chain([first_line, second_line], file), first_number):
        if line.strip():
            location = f"{path}, line {line_number}"
            yield _row(_parsed(line, location), location)


def _parsed(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "write one object per line, without line breaks inside"
        raise DataError("DATA031", f"{location}: not JSON", str(error), "an object", fix) from None


def _row(record: Any, location: str) -> Row:
    if not isinstance(record, dict):
        fix = 'write objects with the names of columns, such as {"text": …}'
        if isinstance(record, list):
            fix += f", or {BY_PANDAS}"
        raise DataError("DATA031", f"{location}: not a JSON object", type(record).__name__, "an object", fix)
    return location, record


def _is_row(line: str) -> bool:
    """Whether a line is an object of its own, as in JSON lines."""
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        return isinstance(record, dict) and _records(record) == [record]
    return False


def _records(parsed: Any) -> list[Any]:
    """The objects in a document."""
    rows = parsed.get("data") if isinstance(parsed, dict) else parsed
    if isinstance(rows, list) and (rows is parsed or is_list_of(rows, Mapping)):
        return rows
    return [parsed]


def csv_rows(file: IO[str], path: Path, columns: Sequence[Column], account: Account) -> Iterator[Row]:
    """The rows after the first, which names the columns.

    If a table lacks the default column of texts, its only column with text takes the place.

    Raises:
        DataError: the quotes don't match, a column is missing, or several columns may be the text.

    """
    csv.field_size_limit(sys.maxsize)
    head = file.readline()
    delimiter = "\t" if kind_of(path) == ".tsv" else _delimiter(head)
    reader = csv.reader(itertools.chain([head], file), delimiter=delimiter, strict=True)
    lines = _lines(reader, path)
    _, header = next(lines, ("", []))
    names = [name.strip() for name in header]
    require_unique(str(path), names)
    rows = _fitting(lines, names, account)
    sample = list(itertools.islice(rows, _SAMPLE_ROWS))
    columns = outer_columns(columns, names)
    needed = {column.name for column in columns}
    if needed.isdisjoint(names) and _has_no_header(names, sample):
        allowed = "a first line with the names of the columns"
        raise DataError("DATA032", f"{path} begins with a row", listed(names), allowed, "put such a line before it")
    for column in columns:
        chosen_name = _chosen_column(names, sample, column, needed - {column.name}, path)
        if chosen_name != column.name:
            name = readable(chosen_name)
            note = f"the text of {readable(path.name)} is its column {name!r}, the only one with text"
            account.note(f"{note}; its first line is no sample")
            names[names.index(chosen_name)] = column.name
    for location, fields in itertools.chain(sample, rows):
        yield location, dict(zip(names, fields, strict=True))


def _delimiter(head: str) -> str:
    """The likeliest delimiter: the most frequent one in the header, outside quotes."""
    bare = "".join(head.split('"')[::2])
    return max(_DELIMITERS, key=bare.count)


def _lines(reader: Any, path: Path) -> Iterator[tuple[str, list[str]]]:
    """The records of a CSV file that aren't empty; a quoted field may span several lines."""
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            fix = "quote fields that contain quotes, delimiters or line breaks, and double the quotes inside"
            raise DataError("DATA031", f"{path}, line {reader.line_num}: not CSV", str(error), fix=fix) from None
        if fields:
            yield f"{path}, line {reader.line_num}", fields


def _fitting(
    lines: Iterable[tuple[str, list[str]]], names: list[str], account: Account
) -> Iterator[tuple[str, list[str]]]:
    for location, fields in lines:
        if len(fields) == len(names):
            yield location, fields
        else:
            account.leave_out("rows", "more or fewer fields than columns", name=location.rpartition("/")[2])


def _has_no_header(names: list[str], sample: Iterable[tuple[str, list[str]]]) -> bool:
    """Whether a first line looks like a row: it has a number, a long text, or values that later rows have there."""
    filled_names = list(filter(None, names))
    if filled_names == list(map(str, range(len(filled_names)))):  # pandas numbers columns in this way.
        return False
    if any(map(_is_number, names)) or max(map(len, names), default=0) > _LONGEST_NAME:
        return True
    repetitions = Counter[str]()
    for _, fields in sample:
        if fields != names:  # Tables that were joined have their names again.
            repetitions.update(set(filled_names).intersection(fields))
    return max(repetitions.values(), default=0) > 1


def _chosen_column(
    names: list[str], sample: list[tuple[str, list[str]]], column: Column, reserved: Collection[str], path: Path
) -> str:
    """Name of a column in the table: its own, or for texts that of the only column with text."""
    if column.name in names:
        return column.name
    textual = []
    for number, name in enumerate(names):
        if name not in reserved and any(_is_text(fields[number]) for _, fields in sample):
            textual.append(name)
    if column != Column(DEFAULT_COLUMN, TEXT_FLAG) or len(textual) != 1:
        raise no_column(str(path), column, names)
    return textual[0]


def _is_text(field: str) -> bool:
    return field.strip().lower() not in _NO_TEXTS and not _is_number(field)


def _is_number(field: str) -> bool:
    with suppress(ValueError):
        float(field.replace(",", "."))
        return True
    return False


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
