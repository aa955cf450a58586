"""Patience of a reader whose dataset isn't the one that the run began with, or can't be read."""

from __future__ import annotations

import time
from collections.abc import Callable

RETRY_S = 0.5
"""Seconds between two tries while nothing serves a slice."""


class ReaderPatience:
    """Limit of a wait, and its report to the user: each reason is reported once, until the wait has succeeded.

    Args:
        idle_s: longest wait, in seconds.
        problem: takes a line of text for the user.

    """

    def __init__(self, idle_s: float, problem: Callable[[str], None]) -> None:
        self.idle_s = idle_s
        self._problem = problem
        self._reported: set[str] = set()

    def deadline(self) -> float:
        """Monotonic time until which a wait that begins now may last."""
        return time.monotonic() + self.idle_s

    def tell(self, reason: str) -> None:
        """Report why the run waits, unless that was reported since the last success."""
        if reason not in self._reported:
            self._reported.add(reason)
            self._problem(f"{reason}; the run waits for it, {self.idle_s:g} s at most")

    def served(self) -> None:
        """Record a success: the same reasons are reported again later."""
        self._reported.clear()
