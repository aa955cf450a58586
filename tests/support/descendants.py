"""Processes that a test's Ray has started, by the actors that they are."""

from __future__ import annotations

from contextlib import suppress

import psutil


def processes_of(actor: str) -> set[psutil.Process]:
    """Living processes of an actor class below this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ended meanwhile, or a zombie.
            if f"ray::{actor}" in " ".join(process.cmdline()):
                found.add(process)
    return found
