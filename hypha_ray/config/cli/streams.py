"""Standard streams that can't make a job fail.

A job may run for days and print its result at the end. ``| head -1``, a closed stream or an ASCII locale must not make
it fail. Text that nothing reads is dropped, and a character that the encoding lacks becomes a question mark.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def endure() -> None:
    """Replace standard output and standard error by such streams, once; streams set by other code stay."""
    _occupy()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _enduring(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _enduring(sys.stderr, 2)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes for the user on standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def unwritten() -> str:
    """Reason that standard output could not be written; empty if it was, or if its reader went away."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    raw = getattr(sys.stdout, "buffer", None)
    raw = getattr(raw, "raw", raw)
    return raw.problem if isinstance(raw, _Enduring) else ""


class _Enduring(io.FileIO):
    """A descriptor that accepts everything; `problem` is the first failure other than a reader's departure."""

    problem = ""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except BlockingIOError:
            raise
        except OSError as error:
            self.problem = self.problem or error.strerror or str(error)
        return len(memoryview(data))


def _enduring(stream: TextIO | None, descriptor: int) -> TextIO:
    raw = _Enduring(descriptor, "wb", closefd=False)
    # With `python -u`, text goes straight to the descriptor; otherwise through a buffer, as in Python's own streams.
    straight = isinstance(stream, io.TextIOWrapper) and stream.write_through
    return io.TextIOWrapper(
        raw if straight else io.BufferedWriter(raw),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="replace",
        line_buffering=raw.isatty() or descriptor == 2,
        write_through=straight,
    )


def _occupy() -> None:
    """Open the null device for every closed standard stream, so that no other file gets its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
