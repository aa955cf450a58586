"""Work that this process does now, for signs of life to tell: what ends one worker after the other has a name then."""

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
    """Whether it ends by itself, as there is a limit of time on it."""


_current = WorkState()


def current_work() -> WorkState:
    """Return what the process does now; safe in any thread."""
    return _current


@contextmanager
def working(text: str = "", limited: bool = False) -> Iterator[Callable[[str], None]]:
    """Do this work in the block; what was done before goes on after it.

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
