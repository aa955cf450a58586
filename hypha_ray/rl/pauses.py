"""Pauses between attempts: longer each time, or as long as the other side asks for."""

from __future__ import annotations

MOST_TOLD_S = 60.0
"""Longest time in seconds that one request waits because it was told to, all of its pauses together."""
_FIRST_S = 0.5
_LONGEST_S = 30.0


class Pauses:
    """Pauses of one request.

    Args:
        attempts: number of attempts after the first one that are made without being told when.

    """

    def __init__(self, attempts: int) -> None:
        self._attempts = attempts
        self._done = 0
        self._told_s = 0.0

    def after(self, retry_after_s: float | None) -> float | None:
        """Return the time in seconds until the next attempt; None: there is none.

        A pause that the other side asks for uses up no attempt, until `MOST_TOLD_S` have passed in such pauses.

        Args:
            retry_after_s: time that the other side asks for; None if it asks for none.

        """
        usual_s = min(_LONGEST_S, _FIRST_S * 2.0 ** min(self._done, 10))
        left_s = MOST_TOLD_S - self._told_s
        if self._attempts and retry_after_s is not None and left_s > 0:
            told_s = min(max(retry_after_s, usual_s), left_s)
            self._told_s += told_s
            return told_s
        if self._done >= self._attempts:
            return None
        self._done += 1
        return usual_s

    def begin_anew(self) -> None:
        """Allow all attempts again, because something was reached."""
        self._done = 0
