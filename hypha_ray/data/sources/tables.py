"""Rows of CSV, TSV, JSON and JSON lines files, and their texts."""

from __future__ import annotations

import csv
import itertools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeAlias, TypeGuard, TypeVar

from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.sources.files import (
    BY_PANDAS,
    PIECE_CHARACTERS,
    kind_of,
    lone_piece_characters,
    pieces,
    require_rows,
)
from hypha_ray.errors import DataError

JSON = frozenset({".jsonl", ".ndjson", ".json"})
CSV = frozenset({".csv", ".tsv"})

DEFAULT_COLUMN = "text"
TEXT_FLAG = "--text-column"
_MOST_NAMES: Final = 20
"""Most names of columns that an error lists."""
_OF_CHATS = frozenset({"messages", "conversations"})
_QUESTIONS = ("prompt", "instruction", "question", "query", "input")
_ANSWERS = ("completion", "output", "response", "answer", "target")
"""Usual names of columns with prompts and with answers, which a remedy names."""
_DELIMITERS = ",;\t|"
_LONGEST_NAME: Final = 80
"""Most characters that a column's name is expected to have; questions of surveys are long."""
_SAMPLE_ROWS = 1000
"""Number of first rows that decide which columns contain text."""
_NO_TEXTS = frozenset({"", "true", "false", "yes", "no", "nan", "null", "none", "na", "n/a"})

T_co = TypeVar("T_co", covariant=True)

Row: TypeAlias = tuple[str, Mapping[str, Any]]
"""Place of a row, and its columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column to read from tables, and the flag that names it.

    `classes` receives the names that a Hugging Face dataset has for numbers in the column; None: numbers stay.
    """

    name: str
    flag: str
    classes: list[str] | None = field(default=None, compare=False)


class Reader(Protocol[T_co]):
    """Makes documents or prompts from the contents of files."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that a table needs; empty: all are read."""
        ...

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[T_co]:
        """Documents or prompts of a table; unusable rows are recorded in the account, or refused."""
        ...

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[T_co]:
        """Documents or prompts of a plain text; `is_only_file` if it is the source's only file."""
        ...


class TextReader:
    """Reads documents: the texts of a column, or pieces of a plain text."""

    def __init__(self, column: str) -> None:
        self._column = Column(column, TEXT_FLAG)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The column with the text."""
        return (self._column,)

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[str]:
        """The texts in the column."""
        return texts(rows, self._column, account)

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[str]:
        """The text in pieces, cut at line ends."""
        characters = lone_piece_characters(path) if is_only_file else PIECE_CHARACTERS
        return pieces(file, characters)


def texts(rows: Iterable[Row], column: Column, account: Account) -> Iterator[str]:
    """The texts in a column; rows without text and unused columns are recorded in the account.

    Raises:
        DataError: no row has the column, or none has text in it.

    """
    name = column.name
    is_usable = False
    unused = set[str]()
    error: DataError | None = None
    for location, row in rows:
        new_columns = row.keys() - unused - {name}
        if new_columns:
            account.drop(sorted(new_columns))
            unused |= row.keys()
        text = row.get(name)
        if isinstance(text, str) and text.strip():
            is_usable = True
            yield text
        elif text is None or isinstance(text, str):
            is_usable = is_usable or name in row
            account.leave_out("rows", "without text")
            error = error or no_column(location, column, row)
        else:
            account.leave_out("rows", f"{name} isn't text")
            problem = f"{location}: column {name!r} isn't text"
            fix = f"name one with {column.flag}"
            error = error or DataError("DATA031", problem, type(text).__name__, "text", fix)
    if error is not None and not is_usable:
        raise error


def no_column(location: str, column: Column, row: Iterable[str]) -> DataError:
    """The error for a table without a column, by one of its rows or by the names of its columns."""
    names = set(row)
    fix = _naming(column, row)
    if "train" in names:
        fix = "make a file of these rows alone, such as by `jq -c '.train[]' FILE > train.jsonl`"
    elif column.flag == TEXT_FLAG and names & _OF_CHATS:
        fix = f"train on chats with --chat, or {fix}"
    elif column.flag == TEXT_FLAG:
        other_fix = columns_fix(row)
        fix = fix if other_fix is None else f"{other_fix}, or {fix}"
    return DataError("DATA032", f"{location} has no column {column.name!r}", listed(names), fix=fix)


def listed(names: Collection[str]) -> str:
    """The first names of columns in order, and the number of the others."""
    first_names = ", ".join(sorted(map(readable, names))[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        return f"{first_names} and {len(names) - _MOST_NAMES} more"
    return first_names or "no columns"


def _naming(column: Column, row: Iterable[str]) -> str:
    """Remedy that names the column by its flag: the most similar one, or the only one with text."""
    names = {name.lower(): name for name in row}
    candidates = get_close_matches(column.name.lower(), names, n=1)
    if column.flag == TEXT_FLAG and isinstance(row, Mapping) and not candidates:
        candidates = [name for name, value in row.items() if isinstance(value, str) and value.strip()]
    if len(candidates) != 1:
        return f"name one with {column.flag}"
    name = names.get(candidates[0], candidates[0])
    return f"name one with {column.flag}, such as {shlex.quote(readable(name))}"


def columns_fix(row: Iterable[str]) -> str | None:
    """Remedy that names the flags for usual columns of chats, prompts and answers; None without such columns."""
    names = set(row)
    if names >= {"chosen", "rejected"}:
        return "prepare preferences with --kind preferences"
    if isinstance(row, Mapping):
        for name, value in row.items():
            if is_list_of(value, dict) and value and value[0].keys() >= {"role", "content"}:
                return f"train on chats with --chat --messages-column {shlex.quote(readable(name))}"
    prompt = next((name for name in _QUESTIONS if name in names), None)
    answer = next((name for name in _ANSWERS if name in names), None)
    if prompt is None or answer is None:
        return None
    flags = f"--prompt-column {prompt} --completion-column {answer}"
    return f"train on answers with {flags}, and with --chat for a template"


def no_table(path: Path, missing: str) -> DataError:
    """The error for a plain text if a table is needed."""
    allowed = "CSV, TSV, JSON, JSON lines, Parquet, or a Hugging Face dataset"
    return DataError("DATA032", f"{path} has no {missing}", "a plain text", allowed)


def useless_value(location: str, column: Column, got: str, allowed: str) -> DataError:
    """The error for a value that a column can't have."""
    problem = f"{location}: column {column.name!r} is of no use"
    return DataError("DATA031", problem, got, allowed, f"name another with {column.flag}")


def without_surrogates(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and which aren't text."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()


def complete(rows: Iterable[Row], columns: Sequence[Column], account: Account) -> Iterator[Row]:
    """Rows and their places, checked to have all of these columns; others are put into the account as dropped.

    Raises:
        DataError: DATA032, a row lacks a column.

    """
    used_columns = {column.name for column in columns}
    for location, row in rows:
        account.drop(sorted(row.keys() - used_columns))
        require_columns(location, row, columns)
        yield location, row


def outer_columns(columns: Iterable[Column], names: Collection[str]) -> list[Column]:
    """Columns of a table with these names that have the given ones: of a field such as ``a.b`` the column ``a``."""
    return [replace(column, name=outer_name(column.name, names) or column.name) for column in columns]


def outer_name(name: str, names: Collection[str]) -> str | None:
    """Name of the column that is a dotted name, or that has the field of this name; None if there is none."""
    outer = name
    while outer not in names:
        outer, dot, _ = outer.rpartition(".")
        if not dot:
            return None
    return outer


def require_columns(location: str, row: Mapping[str, Any], columns: Iterable[Column]) -> None:
    """Refuse a row that lacks one of the columns.

    Raises:
        DataError: DATA032.

    """
    for column in columns:
        if column.name not in row:
            raise no_column(location, column, row)


def require_unique(location: str, names: Collection[str]) -> None:
    """Refuse columns of a table that have the same name.

    Raises:
        DataError: DATA032.

    """
    if len(set(names)) < len(names):
        raise DataError("DATA032", f"{location} has two columns of the same name", ", ".join(names), fix="rename one")


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


def _parsed(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = "write one object per line, without line breaks inside"
        raise DataError("DATA031", f"{location}: not JSON", str(error), "an object", fix) from None


def list_of(value: Any, beginnings: str = "[") -> Any:
    """The list in a column, which CSV files have as JSON; any other value as it is, also JSON that begins otherwise."""
    if isinstance(value, str) and value.lstrip().startswith(tuple(beginnings)):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def is_list_of(value: Any, item_type: type) -> TypeGuard[list[Any]]:
    """Check that a value is a list whose items are all of a type."""
    return isinstance(value, list) and all(isinstance(item, item_type) for item in value)


def objects_of(value: Any) -> Any:
    """The list in a column as `list_of` has it; a list of objects that are JSON texts is read."""
    values = list_of(value)
    if isinstance(values, list) and all(map(_is_object_text, values)):
        with suppress(ValueError, RecursionError):
            return [json.loads(text) for text in values]
    return values


def _is_object_text(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


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
