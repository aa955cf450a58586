"""Numba is loaded only where large arrays are: it takes a second, and 50 MB."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from threading import Thread
from types import ModuleType


@cache
def compiled(name: str) -> ModuleType | None:
    """A module beside this one, `compiled_` and the name; None where numba can't compile it."""
    try:
        return import_module(f"hypha_ray.kernels.compiled_{name}")
    except Exception:  # It isn't there, doesn't know this processor, or finds no folder to keep what it compiles.
        return None


def load_ahead(name: str) -> None:
    """Load such a module beside whatever else goes on: where it is compiled first, that takes seconds."""
    Thread(target=compiled, args=(name,), name=f"loads {name}", daemon=True).start()
