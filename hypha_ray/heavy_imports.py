"""Imports of large libraries, without the search for garbage that makes them slow."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Load libraries without searching for garbage among what they make, nor ever afterwards.

    torch and transformers make a million objects, which stay. Repeated searches among them take an eighth of the time
    of loading, and as much at the end of the process (`gc.freeze`). Models, which come and go, are to be made outside:
    their garbage would stay as well. May be within another one.
    """
    was_on = gc.isenabled()
    modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if len(sys.modules) > modules:
                gc.freeze()
            gc.enable()
