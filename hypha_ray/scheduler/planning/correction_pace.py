"""The times at which the plans of a round are corrected: all of a fleet is looked at for that."""

from __future__ import annotations

import math

AT_ONCE = 64
"""Workers up to which plans are corrected at every report and delta."""
LONGEST_S = 1.0
"""Longest interval in seconds, which fleets of a thousand workers and more have."""


class CorrectionPace:
    """Lets corrections through at once in a small fleet, and at intervals in a large one.

    Args:
        workers: most workers of the fleet.

    """

    def __init__(self, workers: int) -> None:
        self._every_s = 0.0 if workers <= AT_ONCE else min(LONGEST_S, workers / 1000)
        self._last_at = self._urgent_at = -math.inf
        self.overdue = False
        """Whether a correction was put off."""

    def allows(self, now: float, urgent: bool = False) -> bool:
        """Whether plans are to be corrected now; otherwise the correction is overdue.

        An urgent correction, as after a loss, waits for nothing but the urgent one before it.
        """
        self.overdue = now < (self._urgent_at if urgent else self._last_at) + self._every_s
        if not self.overdue:
            self._last_at = now
            self._urgent_at = now if urgent else self._urgent_at
        return not self.overdue

    def hurry(self) -> None:
        """Allow the next correction whenever it comes."""
        self._last_at = -math.inf
