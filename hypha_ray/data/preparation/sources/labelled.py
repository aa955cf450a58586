"""Sources of labelled texts: tables with a text, or a list of words, and its labels in each row; labels as numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hypha_ray.data.manifest import ClassInfo
from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.tables import TEXT_FLAG, Column, Row, complete, list_of, no_table
from hypha_ray.data.provenance import Account, readable
from hypha_ray.errors import DataError

_LARGEST = 3.4e38
_MARKS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}
Label: TypeAlias = str | list[str]
"""Name of a class, or names of several."""


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text, or a list of words, and its label, labels, or number to predict; `where` is the place of its row."""

    where: str
    text: str | list[str]
    label: Label | float
    second: str | None = None
    """Text that belongs to the first one; None without."""


def labelled_texts(options: Options, classes: list[str], account: Account) -> Iterator[LabelledText]:
    """The labelled texts of a source, up to the number asked for; `classes` receives names that the source has.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    found = read(options, LabelledTextReader(options, classes), account)
    for text in itertools.islice(found, options.max_documents):
        account.documents += 1
        yield text


class LabelledTextReader:
    """Reads rows of a table with a text and its label."""

    def __init__(self, options: Options, classes: list[str]) -> None:
        self._text = Column(options.text_column, TEXT_FLAG)
        second = options.second_column
        self._second: tuple[Column, ...] = () if second is None else (Column(second, "--second-column"),)
        self._regression = options.regression
        self._marks = tuple(options.label_columns)
        names, flag = (self._marks, "--label-columns") if self._marks else ((options.label_column,), "--label-column")
        known = None if self._marks or options.regression else classes
        self._labels = tuple(Column(str(name), flag, known) for name in names)
        classes += self._marks

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of texts and labels."""
        return self._text, *self._second, *self._labels

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[LabelledText]:
        """The texts of rows; those without text or label are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        for where, row in complete(rows, self.columns, account):
            text = _words_or_text(row[self._text.name])
            labels = [list_of(row[column.name]) for column in self._labels]
            seconds = [row[column.name] for column in self._second]
            if text is None or text == [] or any(isinstance(one, str) and not one.strip() for one in (text, *seconds)):
                account.leave_out("rows", "without text")
            elif None in seconds:
                account.leave_out("rows", "without a second text")
            elif any(map(no_label, labels)):
                account.leave_out("rows", "without a label")
            else:
                second = self._second_text(where, *seconds) if seconds else None
                yield LabelledText(where, self._words(where, text), self._label(where, labels), second)

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[LabelledText]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, f"column {self._labels[0].name!r}")

    def _label(self, where: str, values: Sequence[Any]) -> Label | float:
        """Name of a class, names of several, or a number to predict."""
        if self._regression:
            return _number(where, self._labels[0], values[0])
        if self._marks:
            pairs = zip(self._labels, values, strict=True)
            return [column.name for column, value in pairs if _is_marked(where, column, value)]
        return label_of(where, self._labels[0], values[0])

    def _second_text(self, where: str, value: Any) -> str:
        if not isinstance(value, str):
            raise _useless(where, self._second[0], type(value).__name__, "text")
        return _clean(value)

    def _words(self, where: str, value: Any) -> str | list[str]:
        if isinstance(value, str):
            return _clean(value)
        if isinstance(value, list) and all(isinstance(word, str) for word in value):
            return [_clean(word) for word in value]
        raise _useless(where, self._text, type(value).__name__, "text, or a list of words")


def no_label(value: Any) -> bool:
    """Whether a row has no label: nothing, white space, or NaN, as tables of pandas have where one is missing."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and not value.strip())


def label_of(where: str, column: Column, value: Any) -> Label:
    """The name of a class, or names of several; a whole number is the name of its class.

    Raises:
        DataError: the value is anything else, or a list with an empty text.

    """
    many = isinstance(value, list)
    values = [_whole(one) for one in (value if many else [value])]
    if not all(isinstance(one, str | int) for one in values):
        wrong = type(next(one for one in values if not isinstance(one, str | int))).__name__
        raise _useless(where, column, wrong, "text or a whole number, or a list of them")
    names = [readable(str(one).strip()) for one in values]
    if not all(names):
        raise _useless(where, column, "an empty label", "text or a whole number, or a list of them")
    return names if many else names[0]


def _whole(value: Any) -> Any:
    """A label, a whole number in the place of a float such as 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _number(where: str, column: Column, value: Any) -> float:
    """A finite number that float32 can hold."""
    with suppress(ValueError, TypeError, OverflowError):
        number = math.nan if isinstance(value, bool) else float(value)
        if abs(number) <= _LARGEST:
            return number
    raise _useless(where, column, readable(str(value)), "a finite number")


def _is_marked(where: str, column: Column, value: Any) -> bool:
    """Whether a row is of the class of a column."""
    mark = _MARKS.get(str(value).strip().lower())
    if mark is None:
        raise _useless(where, column, readable(str(value)), "0 or 1")
    return mark


def _words_or_text(value: Any) -> Any:
    """A text, or a list of words; other lists in CSV files, such as ``[1]``, are texts."""
    found = list_of(value)
    return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else value


def _clean(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and which aren't text."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _useless(where: str, column: Column, got: str, allowed: str) -> DataError:
    problem = f"{where}: column {column.name!r} is of no use"
    return DataError("DATA031", problem, got, allowed, f"name another with {column.flag}")


def classes_of(labels: Iterable[Label], known: Sequence[str], several: bool, source: str) -> ClassInfo:
    """Classes of a source with their names by number.

    Args:
        labels: label of each sample.
        known: names that the source has for its classes; empty without.
        several: whether a sample may have several classes.
        source: name of the source, for the error.

    Raises:
        DataError: all samples have the same label, so that there is nothing to learn.

    """
    marks = {frozenset([label] if isinstance(label, str) else label) for label in labels}
    names = {name for mark in marks for name in mark}
    if len(marks if several else names) < 2:
        only = ", ".join(map(repr, sorted(names))) or "none"
        raise _the_same(source, only, "at least two classes", "add samples of other classes")
    return ClassInfo(tuple(known) if known else _by_number(names), several)


def require_different(numbers: Iterable[float], source: str) -> None:
    """Check that numbers to predict aren't all the same.

    Raises:
        DataError: they are, so that there is nothing to learn.

    """
    found = set(numbers)
    if len(found) < 2:
        raise _the_same(source, f"{found.pop():g}", "different numbers", "name another --label-column")


def _the_same(source: str, got: str, allowed: str, fix: str) -> DataError:
    return DataError("DATA039", f"all labels in {source} are the same", got, allowed, fix)


def _by_number(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes by number: whole numbers by size, texts by alphabet."""
    names = list(names)
    whole = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=(lambda name: (int(name), name)) if whole else None))


def numbered(label: Label, numbers: Mapping[str, int]) -> npt.NDArray[np.generic]:
    """The number of a class, int32 []; of several classes 1 for each one that is there, uint8 [C]."""
    if isinstance(label, str):
        return np.array(numbers[label], np.int32)
    return np.array([name in label for name in numbers], np.uint8)
