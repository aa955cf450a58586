"""Limit on how far training may run ahead of the store. Times are monotonic seconds."""

from __future__ import annotations

import math

from hypha_ray.scheduler.messages import Outbox

AHEAD = 4
"""Most rounds in progress or not yet stored: each holds weights and momentum in memory."""
HELD_S = 10.0
"""Seconds that a round waits for the store before a problem is reported."""


class StorePace:
    """Counts the rounds that the store has written.

    Args:
        written: number of rounds that were stored before.
        out: takes the problem of a slow store.

    """

    def __init__(self, written: int, out: Outbox) -> None:
        self._written = written
        self._out = out
        self._held_at: float | None = None
        """Time at which a round began to wait; None if none waits, infinity once the wait is reported."""

    def wrote(self, round: int) -> None:
        """Count a round as stored."""
        self._written = max(self._written, round + 1)

    def holds(self, round: int, now: float) -> bool:
        """Return True if a round has to wait before it begins; report a long wait once."""
        if round - self._written < AHEAD:
            self._held_at = None
            return False
        self._held_at = now if self._held_at is None else self._held_at
        if now - self._held_at >= HELD_S:
            self._held_at = math.inf
            self._out.problem(f"training waits for the store, which is {AHEAD} rounds behind: is the disk slow?", now)
        return True
