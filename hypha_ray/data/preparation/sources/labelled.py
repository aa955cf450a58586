"""Sources of labelled texts: tables with a text, or a list of words, and its labels in each row; labels as numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import ClassInfo
from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.sources.documents import counted_records, read
from hypha_ray.data.preparation.sources.tables import (
    TEXT_FLAG,
    Column,
    Row,
    complete,
    is_list_of,
    list_of,
    no_table,
    useless_value,
    without_surrogates,
)
from hypha_ray.data.provenance import Account, readable
from hypha_ray.errors import DataError

_LARGEST = 3.4e38
_MARKS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
Label: TypeAlias = str | list[str]
"""Name of a class, or names of several."""


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text, or a list of words, and its label, labels, or number to predict; `location` names its row."""

    location: str
    text: str | list[str]
    label: Label | float
    second: str | None = None
    """Text that belongs to the first one; None without."""


def labelled_texts(options: PrepareOptions, classes: list[str], account: Account) -> Iterator[LabelledText]:
    """The labelled texts of a source, up to the number asked for; `classes` receives names that the source has.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    texts = read(options, LabelledTextReader(options, classes), account)
    yield from counted_records(texts, options.max_documents, account)


class LabelledTextReader:
    """Reads rows of a table with a text and its label."""

    def __init__(self, options: PrepareOptions, classes: list[str]) -> None:
        self._text = Column(options.text_column, TEXT_FLAG)
        self._second: tuple[Column, ...] = ()
        if options.second_column is not None:
            self._second = (Column(options.second_column, "--second-column"),)
        self._regression = options.regression
        self._has_marks = bool(options.label_columns)
        if self._has_marks:
            self._labels = tuple(Column(name, "--label-columns") for name in options.label_columns)
            classes += options.label_columns
        else:
            class_names = None if options.regression else classes
            self._labels = (Column(str(options.label_column), "--label-column", class_names),)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of texts and labels."""
        return self._text, *self._second, *self._labels

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[LabelledText]:
        """The texts of rows; those without text or label are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        for location, row in complete(rows, self.columns, account):
            text = _words_or_text(row[self._text.name])
            labels = [list_of(row[column.name]) for column in self._labels]
            seconds = [row[column.name] for column in self._second]
            if text is None or text == [] or any(map(_is_blank, (text, *seconds))):
                account.leave_out("rows", "without text")
            elif None in seconds:
                account.leave_out("rows", "without a second text")
            elif any(map(no_label, labels)):
                account.leave_out("rows", "without a label")
            else:
                second = self._second_text(location, *seconds) if seconds else None
                yield LabelledText(location, self._words(location, text), self._label(location, labels), second)

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[LabelledText]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, f"column {self._labels[0].name!r}")

    def _label(self, location: str, values: Sequence[Any]) -> Label | float:
        """Name of a class, names of several, or a number to predict."""
        if self._regression:
            return _number(location, self._labels[0], values[0])
        if self._has_marks:
            marks = map(partial(_is_marked, location), self._labels, values)
            return [column.name for column, marked in zip(self._labels, marks, strict=True) if marked]
        return label_of(location, self._labels[0], values[0])

    def _second_text(self, location: str, value: Any) -> str:
        if not isinstance(value, str):
            raise useless_value(location, self._second[0], type(value).__name__, "text")
        return without_surrogates(value)

    def _words(self, location: str, value: Any) -> str | list[str]:
        if isinstance(value, str):
            return without_surrogates(value)
        if is_list_of(value, str):
            return [without_surrogates(word) for word in value]
        raise useless_value(location, self._text, type(value).__name__, "text, or a list of words")


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def no_label(value: Any) -> bool:
    """Whether a row has no label: nothing, white space, or NaN, which tables of pandas have for a missing one."""
    if isinstance(value, float | Decimal):
        return math.isnan(value)
    return value is None or _is_blank(value)


def label_of(location: str, column: Column, value: Any) -> Label:
    """The name of a class, or names of several; a whole number is the name of its class.

    Raises:
        DataError: the value is anything else, or a list with an empty text.

    """
    values = value if isinstance(value, list) else [value]
    allowed = "text or a whole number, or a list of them"
    labels = list(map(_without_fraction, values))
    for label in labels:
        if not isinstance(label, str | int):
            raise useless_value(location, column, type(label).__name__, allowed)
    names = [readable(str(label).strip()) for label in labels]
    if not all(names):
        raise useless_value(location, column, "an empty label", allowed)
    return names if isinstance(value, list) else names[0]


def _without_fraction(value: Any) -> Any:
    """A label; a float or a decimal such as 1.0 becomes a whole number."""
    if isinstance(value, float | Decimal) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _number(location: str, column: Column, value: Any) -> float:
    """A finite number that float32 can hold."""
    with suppress(ValueError, TypeError, OverflowError):
        number = math.nan if isinstance(value, bool) else float(value)
        if abs(number) <= _LARGEST:
            return number
    raise useless_value(location, column, readable(str(value)), "a finite number")


def _is_marked(location: str, column: Column, value: Any) -> bool:
    """Whether a row is of the class of a column."""
    mark = _MARKS.get(str(value).strip().lower())
    if mark is None:
        raise useless_value(location, column, readable(str(value)), "0 or 1")
    return mark


def _words_or_text(value: Any) -> Any:
    """A text, or a list of words; other lists in CSV files, such as ``[1]``, are texts."""
    words = list_of(value)
    return words if is_list_of(words, str) else value


def classes_of(labels: Iterable[Label], class_names: Sequence[str], several: bool, source: str) -> ClassInfo:
    """Classes of a source with their names by number.

    Args:
        labels: label of each sample.
        class_names: names that the source has for its classes; empty without.
        several: whether a sample may have several classes.
        source: name of the source, for the error.

    Raises:
        DataError: all samples have the same label, so that there is nothing to learn.

    """
    combinations = set[frozenset[str]]()
    names = set[str]()
    for label in labels:
        combination = frozenset([label] if isinstance(label, str) else label)
        combinations.add(combination)
        names |= combination
    if len(combinations if several else names) < 2:
        only = ", ".join(map(repr, sorted(names))) or "none"
        raise _all_equal(source, only, "at least two classes", "add samples of other classes")
    return ClassInfo(tuple(class_names) or _by_number(names), several)


def require_different(numbers: Iterable[float], source: str) -> None:
    """Check that numbers to predict aren't all the same.

    Raises:
        DataError: they are, so that there is nothing to learn.

    """
    different = set(numbers)
    if len(different) < 2:
        raise _all_equal(source, f"{different.pop():g}", "different numbers", "name another --label-column")


def _all_equal(source: str, got: str, allowed: str, fix: str) -> DataError:
    return DataError("DATA039", f"all labels in {source} are the same", got, allowed, fix)


def _by_number(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes by number: whole numbers by size, texts by alphabet."""
    ordered = sorted(names)
    if all(name.removeprefix("-").isdecimal() for name in ordered):
        ordered.sort(key=int)
    return tuple(ordered)


def numbered(label: Label, numbers: Mapping[str, int]) -> npt.NDArray[np.generic]:
    """The number of a class, int32 []; for several classes a mark for each class of the dataset, uint8 [C]."""
    if isinstance(label, str):
        return np.array(numbers[label], np.int32)
    return np.array([name in label for name in numbers], np.uint8)
