"""Sources of images and recordings: folders by class, and columns of tables with files or their bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.sources.documents import read
from hypha_ray.data.preparation.sources.labelled import Label, label_of, no_label
from hypha_ray.data.preparation.sources.media_folders import classified, medium_of
from hypha_ray.data.preparation.sources.tables import Column, Row, complete, no_table
from hypha_ray.data.provenance import Account
from hypha_ray.errors import DataError


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a recording: its path, or its content; None instead of a label without one."""

    where: str
    data: Path | bytes
    label: Label | None

    def content(self) -> bytes:
        """The content of the file.

        Raises:
            OSError: it can't be read.

        """
        return self.data if isinstance(self.data, bytes) else self.data.read_bytes()


def media_files(options: Options, classes: list[str], account: Account) -> Iterator[MediaFile]:
    """The images or recordings of a source, up to the number asked for; `classes` receives names that the source has.

    Raises:
        DataError: there is no such source, it is damaged, or a row lacks a column.
        HyphaError: the hub can't be reached, or doesn't let us have it.

    """
    medium = medium_of(options.source, mixed=True)
    found: Iterable[MediaFile]
    if options.media_column is None and medium is not None:
        files = classified(Path(options.source).expanduser(), medium, options.split, account)
        found = (MediaFile(str(path), path, name) for path, name in files)
    else:
        found = read(options, MediaReader(options, classes), account)
    for file in itertools.islice(found, options.max_documents):
        account.documents += 1
        yield file


class MediaReader:
    """Reads rows of a table with a file and its label."""

    def __init__(self, options: Options, classes: list[str]) -> None:
        flag = "--image-column" if options.image_column is not None else "--audio-column"
        self._file = Column(str(options.media_column), flag)
        label = options.label_column
        self._label = None if label is None else Column(label, "--label-column", classes)
        source = Path(options.source).expanduser()
        self._folder = source if source.is_dir() else source.parent

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of file and label."""
        return (self._file,) if self._label is None else (self._file, self._label)

    def of_rows(self, rows: Iterable[Row], account: Account) -> Iterator[MediaFile]:
        """The files of rows; those without file or label are put into the account.

        Raises:
            DataError: a row lacks a column, or has something in it that is of no use.

        """
        for where, row in complete(rows, self.columns, account):
            data = self._data(where, row[self._file.name])
            label = None if self._label is None else row[self._label.name]
            if data is None:
                account.leave_out("rows", "without a file")
            elif self._label is not None and no_label(label):
                account.leave_out("rows", "without a label")
            else:
                yield MediaFile(where, data, None if self._label is None else label_of(where, self._label, label))

    def of_text(self, path: Path, file: IO[str], alone: bool) -> Iterator[MediaFile]:
        """Refuse a plain text: it has no columns."""
        del file, alone
        raise no_table(path, f"column {self._file.name!r}")

    def _data(self, where: str, value: Any) -> Path | bytes | None:
        """A file's path, relative to the table, or its content; None if there is neither."""
        if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
            value = value.get("bytes") or value.get("path")
        if value is None or value == "":
            return None
        if isinstance(value, str):
            return self._folder / Path(value).expanduser()
        if isinstance(value, bytes):
            return value
        what = f"{where}: column {self._file.name!r} is of no use"
        allowed = "a path, or the content of a file"
        raise DataError("DATA031", what, type(value).__name__, allowed, f"name another with {self._file.flag}")
