"""Imports of large libraries with garbage collection off, which makes them faster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off while libraries are loaded, and exempt their objects from it afterwards.

    torch and transformers make a million objects, which stay. Repeated collections among them take an eighth of the
    time of loading, and as much at the end of the process; `gc.freeze` exempts them. Make models outside of this
    context, since their garbage would stay as well. Contexts may be nested.
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
