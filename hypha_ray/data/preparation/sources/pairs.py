"""Sources of pairs: tables with a text and the text that a model has to make of it in each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.tables import Column, Row, complete, no_table
from hypha_ray.data.provenance import Account, readable
from hypha_ray.errors import DataError


class Pair(NamedTuple):
    """A text, and the text that is to be made of it."""

    source: str
    target: str


def pairs(options: Options, account: Account) -> Iterator[Pair]:
    """The pairs of a source, up to the number asked for.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    for pair in itertools.islice(read(options, PairReader(options), account), options.max_documents):
        account.documents += 1
        yield pair


class PairReader:
    """Reads rows of a table with two texts."""

    def __init__(self, options: Options) -> None:
        self._source = Column(str(options.source_column), "--source-column")
        self._target = Column(str(options.target_column), "--target-column")

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of both texts."""
        return self._source, self._target

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[Pair]:
        """The pairs of rows; those with a blank text are put into the account.

        Raises:
            DataError: a row lacks a column, or has something else than text in it.

        """
        for where, row in complete(rows, self.columns, account):
            texts = [_text(where, column, row[column.name]) for column in self.columns]
            if all(texts):
                yield Pair(*texts)
            else:
                account.leave_out("rows", f"without text in {readable(self.columns[texts.index('')].name)}")

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[Pair]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, f"column {self._source.name!r}")


def _text(where: str, column: Column, value: object) -> str:
    """The text of a column, without halves of surrogate pairs; empty if it is blank."""
    if value is None:
        return ""
    if not isinstance(value, str):
        what = f"{where}: column {column.name!r} is of no use"
        fix = f"name another with {column.flag}"
        raise DataError("DATA031", what, type(value).__name__, "text", fix)
    return value.encode("utf-8", "replace").decode() if value.strip() else ""
