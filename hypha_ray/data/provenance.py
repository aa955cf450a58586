"""Account of a preparation: what was read, what was left out, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MOST_NAMES = 5
"""Names that are kept of things that were left out for one reason."""


@dataclass(frozen=True, slots=True)
class Omission:
    """Things that a preparation left out for one reason: files, rows, columns, documents or tokens.

    `names` are the first few, where they have names.
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
    """Origin of a dataset's samples; `files` is 0 where the source has none of its own."""

    files: int
    documents: int
    omissions: tuple[Omission, ...] = ()
    notes: tuple[str, ...] = ()


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
        """Note that `count` things were left out."""
        if count:
            before, names = self._omissions.get((what, reason), (0, ()))
            if name is not None and len(names) < MOST_NAMES:
                names = (*names, readable(str(name)))
            self._omissions[what, reason] = before + count, names

    def drop(self, columns: Iterable[str]) -> None:
        """Note that columns of tables aren't used; one that many files have counts once."""
        self._columns |= dict.fromkeys(columns)

    def add(self, other: Account) -> None:
        """Take over what another account has, but for its documents, which are counted in one place."""
        self.files += other.files
        for (what, reason), (count, names) in other._omissions.items():
            before, known = self._omissions.get((what, reason), (0, ()))
            self._omissions[what, reason] = before + count, (*known, *names)[:MOST_NAMES]
        self.drop(other._columns)
        for text in other._notes:
            self.note(text)

    def note(self, text: str) -> None:
        """Note something else that the user has to know, once."""
        if text not in self._notes:
            self._notes.append(text)

    @property
    def left_out(self) -> str:
        """Omissions in one line; empty without any."""
        return "; ".join(str(omission).strip() for omission in self.origin().omissions)

    def origin(self) -> Origin:
        """The whole account."""
        found = [Omission(*key, *counted) for key, counted in self._omissions.items()]
        if self._columns:
            names = tuple(map(readable, self._columns))[:MOST_NAMES]
            found.append(Omission("columns", f"not used; only {self._used}", len(self._columns), names))
        return Origin(self.files, self.documents, tuple(found), tuple(self._notes))


def counted(number: int, what: str, width: int = 0) -> str:
    """A number of things in words: ``1 file``, ``1,024 files``."""
    return f"{number:>{width},} {what.removesuffix('s') if number == 1 else what}"


def readable(text: str) -> str:
    """A name as text that any file can hold and any terminal shows, on one line."""
    return "".join(character if character.isprintable() else "?" for character in text)
