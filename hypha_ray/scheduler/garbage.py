"""Search for garbage in a process that runs the core."""

from __future__ import annotations

import gc

OBJECTS_PER_WORKER = 2
"""New objects, per worker, after which Python searches for garbage."""


def search_less_often(workers: int) -> None:
    """Search for garbage less often in the process of a large fleet's core.

    The core's objects are kept, form no cycles, and grow in number with the fleet. At Python's default of 700 new
    objects, searches among them take a third of the core's time with 10 000 workers.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, OBJECTS_PER_WORKER * workers), *others)
