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
        listed = ", ".join(self.names) + (", …" if len(self.names) < self.count else "")
        return f"{counted(self.count, self.what, 9)}: {self.reason}" + (f" ({listed})" if self.names else "")


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

    `source` is as it was given, and `options` are the others that differ from their defaults; neither has secrets of
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

    def leave_out(self, what: str, reason: str, count: int = 1, name: object = None) -> None:
        """Record that `count` things were left out."""
        if count:
            before, names = self._omissions.get((what, reason), (0, ()))
            if name is not None and len(names) < MOST_NAMES:
                names = (*names, readable(str(name)))
            self._omissions[what, reason] = before + count, names

    def drop(self, columns: Iterable[str]) -> None:
        """Record unused columns of tables; a column of several files counts once."""
        self._columns |= dict.fromkeys(columns)

    def add(self, other: Account) -> None:
        """Add the contents of another account, except its documents, which are counted in one place."""
        self.files += other.files
        for (what, reason), (count, names) in other._omissions.items():
            before, known = self._omissions.get((what, reason), (0, ()))
            self._omissions[what, reason] = before + count, (*known, *names)[:MOST_NAMES]
        self.drop(other._columns)
        for text in other._notes:
            self.note(text)

    def note(self, text: str) -> None:
        """Record a note for the user, once."""
        if text not in self._notes:
            self._notes.append(text)

    @property
    def left_out(self) -> str:
        """All omissions in one line; empty if there are none."""
        return "; ".join(str(omission).strip() for omission in self.origin().omissions)

    def origin(self) -> Origin:
        """The account as a record for the manifest."""
        found = [Omission(*key, *counted) for key, counted in self._omissions.items()]
        if self._columns:
            names = tuple(map(readable, self._columns))[:MOST_NAMES]
            found.append(Omission("columns", f"not used; only {self._used}", len(self._columns), names))
        return Origin(self.files, self.documents, tuple(found), tuple(self._notes))


def counted(number: int, what: str, width: int = 0) -> str:
    """A number and its noun: ``1 file``, ``1,024 files``."""
    return f"{number:>{width},} {what.removesuffix('s') if number == 1 else what}"


def readable(text: str) -> str:
    """A name as one line of text that any file can contain and any terminal can show."""
    return "".join(character if character.isprintable() else "?" for character in text)
