"""Account of a preparation: the files and documents read, and everything left out with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import JsonValue

MOST_NAMES = 5
"""Most names kept of the things left out for one reason."""


@dataclass(frozen=True, slots=True)
class Omission:
    """Things that a preparation left out for one reason: files, rows, columns, documents or tokens.

    `names` are the first few names; empty if they have none.
    """

    what: str
    reason: str
    count: int
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{amount_text(self.count, self.what, 9)}: {self.reason}"
        if not self.names:
            return text
        names = ", ".join(self.names)
        ellipsis = ", …" if len(self.names) < self.count else ""
        return f"{text} ({names}{ellipsis})"


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a dataset's samples; `files` is 0 if the source has no files of its own."""

    files: int
    documents: int
    omissions: tuple[Omission, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeBy:
    """Command that prepared a dataset.

    `source` is as the user wrote it, and `options` are all others that differ from their defaults, without secrets of
    URLs. `version` is that of hypha_ray; None if it isn't installed. `date` is in UTC, such as
    2026-01-31T12:00:00+00:00; None if it isn't known.
    """

    source: str
    options: dict[str, JsonValue]
    version: str | None
    date: str | None = None


class Account:
    """Collects what a preparation reads and leaves out; `used` names the columns that it reads."""

    def __init__(self, used: str = "the text is") -> None:
        self._used = used
        self.files = 0
        self.documents = 0
        self._omissions: dict[tuple[str, str], tuple[int, tuple[str, ...]]] = {}
        self._columns: dict[str, None] = {}
        self._notes: list[str] = []

    def leave_out(self, plural: str, reason: str, count: int = 1, name: object = None) -> None:
        """Record that `count` things were left out; `plural` is their noun, such as ``rows``."""
        if count:
            count_before, names = self._omissions.get((plural, reason), (0, ()))
            if name is not None and len(names) < MOST_NAMES:
                names = (*names, readable(str(name)))
            self._omissions[plural, reason] = count_before + count, names

    def drop(self, columns: Iterable[str]) -> None:
        """Record unused columns of tables; a column of several files counts once."""
        self._columns |= dict.fromkeys(columns)

    def add(self, account: Account) -> None:
        """Add the contents of another account, except its documents, which the sources count themselves."""
        self.files += account.files
        for key, (count, names) in account._omissions.items():
            count_before, names_before = self._omissions.get(key, (0, ()))
            all_names = (*names_before, *names)
            self._omissions[key] = count_before + count, all_names[:MOST_NAMES]
        self.drop(account._columns)
        for text in account._notes:
            self.note(text)

    def note(self, text: str) -> None:
        """Record a note for the user, once."""
        if text not in self._notes:
            self._notes.append(text)

    @property
    def left_out(self) -> str:
        """All omissions in one line; empty if there are none."""
        omissions = map(str, self.origin().omissions)
        return "; ".join(map(str.strip, omissions))

    def origin(self) -> Origin:
        """The account as a record for the manifest."""
        omissions = []
        for (noun, reason), (count, names) in self._omissions.items():
            omissions.append(Omission(noun, reason, count, names))
        if self._columns:
            columns = tuple(map(readable, self._columns))
            reason = f"not used; only {self._used}"
            omissions.append(Omission("columns", reason, len(columns), columns[:MOST_NAMES]))
        return Origin(self.files, self.documents, tuple(omissions), tuple(self._notes))


def amount_text(number: int, plural: str, width: int = 0) -> str:
    """A number and its noun: ``1 file``, ``1,024 files``."""
    noun = plural.removesuffix("s") if number == 1 else plural
    return f"{number:>{width},} {noun}"


def readable(text: str) -> str:
    """A name as one line of text that any file can contain and any terminal can show."""
    return "".join(character if character.isprintable() else "?" for character in text)
