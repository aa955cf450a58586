"""Patience of a reader whose dataset isn't the one that the run began with, or can't be read."""

from __future__ import annotations

import time
from collections.abc import Callable

RETRY_S = 0.5
"""Seconds between two tries while nothing serves a slice."""


class Patience:
    """Says once what is awaited, and for how long, until it is there again.

    Args:
        idle_s: longest wait, in seconds.
        problem: takes a line of text for the user.

    """

    def __init__(self, idle_s: float, problem: Callable[[str], None]) -> None:
        self.idle_s = idle_s
        self._problem = problem
        self._told: set[str] = set()

    def deadline(self) -> float:
        """Monotonic time until which something is awaited that is missing now."""
        return time.monotonic() + self.idle_s

    def tell(self, reason: str) -> None:
        """Say why the run waits, unless it was said since the last success."""
        if reason not in self._told:
            self._told.add(reason)
            self._problem(f"{reason}; the run waits for it, {self.idle_s:g} s at most")

    def served(self) -> None:
        """Begin anew: what was awaited is there."""
        self._told.clear()
