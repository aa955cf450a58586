"""Clocks of a simulation: a virtual one, on which time passes only between actions, and one at the machine's pace."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Time in seconds, and the actions that are due at later times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order, self._queue = count(), list[tuple[float, int, Callable[[], None]]]()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action; actions due at the same time run in the order of these calls."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def advance(self, deadline: float) -> bool:
        """Advance to the next action and run it, or to an earlier deadline; return whether an action ran."""
        due = bool(self._queue) and self._queue[0][0] <= deadline
        at, _, action = heapq.heappop(self._queue) if due else (deadline, 0, _nothing)
        self.now = max(self.now, at)
        action()
        return due


class WallClock(VirtualClock):
    """The machine's time since the first action: an action is late if those before it took too long."""

    def __init__(self) -> None:
        super().__init__()
        self._began_at = time.monotonic()
        self.latest_s = 0.0
        """Longest delay of an action, in seconds."""

    def advance(self, deadline: float) -> bool:
        """Wait for the next action and run it, or for the deadline if that is earlier."""
        at = min(deadline, self._queue[0][0]) if self._queue else deadline
        time.sleep(max(0.0, self._began_at + at - time.monotonic()))
        self.now = time.monotonic() - self._began_at
        self.latest_s = max(self.latest_s, self.now - at)
        return super().advance(deadline)


def _nothing() -> None:
    """Do nothing."""
