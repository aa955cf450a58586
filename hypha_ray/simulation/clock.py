"""A virtual clock, on which no time passes but from one action to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Time in seconds, and the actions that are due at later times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order, self._queue = count(), list[tuple[float, int, Callable[[], None]]]()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have something done after a while; of actions due at one time, the one that was asked for first."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def advance(self, deadline: float) -> bool:
        """Go on to the next action and do it, or to the deadline if that is earlier; returns whether there was one."""
        due = bool(self._queue) and self._queue[0][0] <= deadline
        at, _, action = heapq.heappop(self._queue) if due else (deadline, 0, _nothing)
        self.now = max(self.now, at)
        action()
        return due


def _nothing() -> None:
    """Let the time pass."""
