"""Work that this process does now. Signs of life name it, so that work which ends every worker is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkState:
    """Work of a process."""

    text: str = ""
    """Function and prompt, or samples; empty if nothing is known."""
    limited: bool = False
    """Whether a limit of time ends the work."""


_current = WorkState()


def current_work() -> WorkState:
    """Return what the process does now; safe in any thread."""
    return _current


@contextmanager
def working(text: str = "", limited: bool = False) -> Iterator[Callable[[str], None]]:
    """Name the work of the block; after it the process does its previous work.

    Returns:
        Function that changes the text.

    """
    global _current  # noqa: PLW0603  One inner loop works in a process.

    def change(text: str) -> None:
        global _current  # noqa: PLW0603
        _current = WorkState(text, limited)

    before = _current
    change(text)
    try:
        yield change
    finally:
        _current = before
