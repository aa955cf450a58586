"""Python's search for garbage, which large libraries make long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Load libraries without searching for garbage among what they make, nor ever afterwards.

    torch and transformers make a million objects, which stay. To go through them again and again takes an eighth of
    the time of loading them, and as much at the end of the process (`gc.freeze`). May be within another one.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()
