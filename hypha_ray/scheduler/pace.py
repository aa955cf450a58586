"""Limits of pace: how often plans are corrected, and how far training may run ahead of the store.

Times are monotonic seconds.
"""

from __future__ import annotations

import math

from hypha_ray.exchange_schedule import SMALL_FLEET
from hypha_ray.scheduler.messages import Outbox

LONGEST_S = 10.0
"""Longest interval in seconds, for ten thousand workers and more."""
CHECK_S = 1.0
"""Seconds between two checks for silent workers and empty slots."""
CHECKED_PER_S = 2000
"""Workers that are checked in a second of a large fleet."""
LEASE_CHECKS = 100
"""Checks in the time of a long lease."""
MAX_ROUNDS_AHEAD = 4
"""Most rounds in progress or not yet stored: each holds weights and momentum in memory."""
LONG_WAIT_S = 10.0
"""Seconds that a round waits for the store before a problem is reported."""


def check_interval_s(workers: int, lease_s: float = 0.0) -> float:
    """Seconds between two checks of so many workers; below the third of the shortest lease in any fleet."""
    return max(CHECK_S, workers / CHECKED_PER_S, lease_s / LEASE_CHECKS)


class CorrectionPace:
    """Allows corrections at once in a small fleet of at most so many workers, and at intervals in a large one."""

    def __init__(self, workers: int) -> None:
        self._every_s = 0.0 if workers <= SMALL_FLEET else min(LONGEST_S, workers / 1000)
        self._last_at = self._urgent_at = -math.inf
        self.overdue = False
        """Whether a correction was deferred."""

    def allows(self, now: float, urgent: bool = False) -> bool:
        """Whether plans may be corrected now; otherwise the correction becomes overdue.

        An urgent correction, as after a loss, keeps the interval only to the urgent one before it.
        """
        previous_at = self._urgent_at if urgent else self._last_at
        self.overdue = now < previous_at + self._every_s
        if not self.overdue:
            self._last_at = now
            if urgent:
                self._urgent_at = now
        return not self.overdue

    def hurry(self) -> None:
        """Allow the next correction at once."""
        self._last_at = -math.inf


class StorePace:
    """Counts the rounds that the store has written, earlier ones included."""

    def __init__(self, written: int, out: Outbox) -> None:
        self._written = written
        self._out = out
        self._waiting_since: float | None = None
        """Time at which a round began to wait; None if none waits, infinity once the wait is reported."""

    def wrote(self, round: int) -> None:
        """Count a round as stored."""
        self._written = max(self._written, round + 1)

    def holds(self, round: int, now: float) -> bool:
        """Return True if a round has to wait before it begins; report a long wait once."""
        if round - self._written < MAX_ROUNDS_AHEAD:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since >= LONG_WAIT_S:
            self._waiting_since = math.inf
            behind = f"{MAX_ROUNDS_AHEAD} rounds behind"
            self._out.problem(f"training waits for the store, which is {behind}: is the disk slow?", now)
        return True
