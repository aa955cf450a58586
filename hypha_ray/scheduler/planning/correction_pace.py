"""Limit on how often plans are corrected, because each correction looks at the whole fleet."""

from __future__ import annotations

import math

AT_ONCE = 64
"""Largest fleet whose plans are corrected at every report and delta."""
LONGEST_S = 1.0
"""Longest interval in seconds, for a thousand workers and more."""


class CorrectionPace:
    """Allows corrections at once in a small fleet, and at intervals in a large one.

    Args:
        workers: largest size of the fleet.

    """

    def __init__(self, workers: int) -> None:
        self._every_s = 0.0 if workers <= AT_ONCE else min(LONGEST_S, workers / 1000)
        self._last_at = self._urgent_at = -math.inf
        self.overdue = False
        """Whether a correction was deferred."""

    def allows(self, now: float, urgent: bool = False) -> bool:
        """Whether plans may be corrected now; otherwise the correction becomes overdue.

        An urgent correction, as after a loss, keeps the interval only to the urgent one before it.
        """
        self.overdue = now < (self._urgent_at if urgent else self._last_at) + self._every_s
        if not self.overdue:
            self._last_at = now
            self._urgent_at = now if urgent else self._urgent_at
        return not self.overdue

    def hurry(self) -> None:
        """Allow the next correction at once."""
        self._last_at = -math.inf
