"""Numba is loaded only where large arrays are: it takes a second, and 50 MB."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from threading import Thread
from types import ModuleType

LANES = 16
"""Float32 values that are loaded, worked on and stored at a time: 64 bytes, a line of the caches."""
LEAST = {"copy": 1 << 18, "outer": 1 << 20}
"""Elements from which on it is worth it. What is smaller to copy stays in the caches, and may be wanted there."""


def is_worth_it(name: str, elements: int) -> bool:
    """Whether arrays of so many elements are large enough for a module, and it can be had."""
    return elements >= LEAST[name] and compiled(name) is not None


@cache
def compiled(name: str) -> ModuleType | None:
    """A module beside this one, `compiled_` and the name; None where numba can't compile it."""
    try:
        return import_module(f"hypha_ray.kernels.compiled_{name}")
    except Exception:  # It isn't there, doesn't know this processor, or finds no folder to keep what it compiles.
        return None


def load_ahead(name: str, elements: int) -> None:
    """Load such a module for arrays of so many elements, beside whatever else goes on: compiling takes seconds."""
    if elements >= LEAST[name]:
        Thread(target=compiled, args=(name,), name=f"loads {name}", daemon=True).start()
