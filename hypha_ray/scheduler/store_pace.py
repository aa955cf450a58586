"""The pace of the store: training waits where it would leave it too far behind. Times are monotonic seconds."""

from __future__ import annotations

import math

from hypha_ray.scheduler.messages import Outbox

AHEAD = 4
"""Rounds that may be under way or wait for the store: each of them holds weights and momentum in memory."""
HELD_S = 10.0
"""Seconds that a round waits for the store before that is told."""


class StorePace:
    """Counts rounds that the store has answered for.

    Args:
        written: those that were there before.
        out: takes what is to be told.

    """

    def __init__(self, written: int, out: Outbox) -> None:
        self._written, self._out = written, out
        self._held_at: float | None = None
        """When a round began to wait; infinity once that is told."""

    def wrote(self, round: int) -> None:
        """The store has answered for a round."""
        self._written = max(self._written, round + 1)

    def holds(self, round: int, now: float) -> bool:
        """Whether a round has to wait before it begins; a long wait is told of, once."""
        if round - self._written < AHEAD:
            self._held_at = None
            return False
        self._held_at = now if self._held_at is None else self._held_at
        if now - self._held_at >= HELD_S:
            self._held_at = math.inf
            self._out.problem(f"training waits for the store, which is {AHEAD} rounds behind: is the disk slow?", now)
        return True
