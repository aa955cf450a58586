"""Attendance of runs at the exchange: their standings while they speak, and the end of those that no longer do."""

from __future__ import annotations

from collections.abc import Container, Iterable

from hypha_ray.market.exchange.allotment import Standing

CHECK_S = 5.0
"""Seconds between two checks for silent runs."""
SILENT_S = 10.0
"""Seconds of silence after which a run's wishes are forgotten; it speaks every two seconds."""
TTL_S = 60.0
"""Seconds of silence after which a run's leases are to be ended; a scheduler is replaced in less."""


class Attendance:
    """Keeps the latest standing of each run; times are monotonic seconds, passed in.

    Args:
        now: time of the first check.
        runs: runs that have leases already, and are to speak.

    """

    def __init__(self, now: float, runs: Iterable[str] = ()) -> None:
        self._checked_s = now
        self._standings: dict[str, Standing] = {}
        self._heard_s = dict.fromkeys(runs, now)
        """Time at which each run spoke last, or from which its silence counts."""

    @property
    def standings(self) -> list[Standing]:
        """Standings of all runs that speak, the first to come in front."""
        return list(self._standings.values())

    def hear(self, standing: Standing, now: float) -> None:
        """Take in the standing of a run."""
        self._standings[standing.run], self._heard_s[standing.run] = standing, now

    def forget_all_but(self, runs: Container[str]) -> None:
        """Forget runs that have ended."""
        for run in [run for run in self._heard_s if run not in runs]:
            del self._heard_s[run]
            self._standings.pop(run, None)

    def check(self, now: float) -> list[str]:
        """Forget silent runs; returns those that have been silent for too long to keep their leases.

        A check that comes late shows that the listening process was stopped itself: silence in that time doesn't count.
        """
        late_s = max(0.0, now - self._checked_s - CHECK_S)
        self._checked_s = now
        self._heard_s = {run: min(now, heard_s + late_s) for run, heard_s in self._heard_s.items()}
        silent_s = {run: now - heard_s for run, heard_s in self._heard_s.items()}
        for run in [run for run in self._standings if silent_s[run] > SILENT_S]:
            del self._standings[run]
        over = [run for run, silence_s in silent_s.items() if silence_s > TTL_S]
        for run in over:
            del self._heard_s[run]
        return over
