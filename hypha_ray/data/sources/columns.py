"""Columns of tables: those that samples are made of, fields within them, and what is said of those that are missing.

Fields of structs, and of tables in other forms, are made columns of their own if an option names them.

Arrow gives all structs of a column the same fields. A field that a row's struct didn't have is null there:

    [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {"y": 2}}]                         as written
    [{"name": "a", "arguments": {"x": 1, "y": None}}, {"name": "b", "arguments": {"x": None, "y": 2}}]   as read
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, Final, Generic, Protocol, TypeAlias, TypeGuard, TypeVar

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account, readable
from hypha_ray.data.sources.files import PIECE_CHARACTERS, lone_piece_characters, pieces
from hypha_ray.errors import DataError

DEFAULT_COLUMN = "text"
TEXT_FLAG = "--text-column"
_MOST_NAMES: Final = 20
"""Most names of columns that an error lists."""
_OF_CHATS = frozenset({"messages", "conversations"})
_QUESTIONS = ("prompt", "instruction", "question", "query", "input")
_ANSWERS = ("completion", "output", "response", "answer", "target")
"""Usual names of columns with prompts and with answers, which a remedy names."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")

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


class FieldReader(Generic[T]):
    """Reads tables with fields such as ``extra_info.index``, which another reader sees as columns."""

    def __init__(self, reader: Reader[T], options: PrepareOptions) -> None:
        self._reader = reader
        self._fields = options.named_fields
        self._kept = options.named_columns

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the other reader."""
        return self._reader.columns

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[T]:
        """The documents or prompts of the other reader."""
        opened_rows = ((location, with_fields(row, self._fields, self._kept)) for location, row in rows)
        return self._reader.of_rows(opened_rows, account)

    def of_text(self, path: Path, file: IO[str], is_only_file: bool) -> Iterator[T]:
        """The documents of a plain text, or a refusal."""
        return self._reader.of_text(path, file, is_only_file)


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


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose structs in lists have only fields that aren't null; null columns stay."""
    columns = dict(row)
    for name, value in row.items():
        if isinstance(value, list):
            columns[name] = _without_null_fields(value)
    return columns


def _without_null_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        fields = value.items()
        return {name: _without_null_fields(inner) for name, inner in fields if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):
        return list(map(_without_null_fields, value))
    return value
