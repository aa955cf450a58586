"""Attendance of runs at the auction: their standings while they speak, and the latest ruling on each.

There is one ruling on all runs a second at most, and answers come from memory until the next:

of(run) ──► from memory, if the run was ruled on within the last second
└─────► otherwise the next ruling on all runs, at the earliest a second after the last one
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Mapping

from hypha_ray.market.allotment import Ruling, Standing

CHECK_S = 5.0
"""Seconds between two checks for silent runs."""
SILENT_S = 10.0
"""Seconds of silence after which a run's wishes are forgotten; it speaks every two seconds."""
TTL_S = 60.0
"""Seconds of silence after which a run's leases are to be ended; a scheduler is replaced in less."""
RULING_S = 1.0
"""Least time in seconds from one ruling to the next, and the age up to which one is told."""


class Attendance:
    """Keeps the latest standing of each run; times are monotonic seconds, passed in.

    Args:
        now: time of the first check.
        runs: runs that have leases already, and are to speak.
        ttl_s: seconds of silence after which a run's leases are to be ended.

    """

    def __init__(self, now: float, runs: Iterable[str] = (), ttl_s: float = TTL_S) -> None:
        self._checked_s = now
        self._ttl_s = ttl_s
        self._standings: dict[str, Standing] = {}
        self._heard_s = dict.fromkeys(runs, now)
        """Time at which each run spoke last, or from which its silence counts."""

    @property
    def standings(self) -> list[Standing]:
        """Standings of all runs that speak, the first to come in front."""
        return list(self._standings.values())

    def record(self, standing: Standing, now: float) -> None:
        """Record the standing of a run."""
        self._standings[standing.run] = standing
        self._heard_s[standing.run] = now

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
        lost = []
        for run in list(self._heard_s):
            heard_s = min(now, self._heard_s[run] + late_s)
            self._heard_s[run] = heard_s
            silence_s = now - heard_s
            if silence_s > SILENT_S:
                self._standings.pop(run, None)
            if silence_s > self._ttl_s:
                del self._heard_s[run]
                lost.append(run)
        return lost


class Rulings:
    """Keeps the latest ruling on each run.

    Args:
        rule: looks at the cluster and rules on all runs; it is called in a thread.
        every_s: least time in seconds between two calls.

    """

    def __init__(self, rule: Callable[[], Mapping[str, Ruling]], every_s: float = RULING_S) -> None:
        self._rule = rule
        self._every_s = every_s
        self.latest: Mapping[str, Ruling] = {}
        """Latest ruling by run."""
        self._began_s = float("-inf")
        """Monotonic time at which the last ruling began."""
        self._ruled_s = float("-inf")
        """Monotonic time at which the last ruling that has ended began."""
        self._next: asyncio.Task[None] | None = None
        """The ruling that is under way, or about to begin."""

    async def of(self, run: str) -> Ruling:
        """Ruling on a run, whose standing has been heard before."""
        oldest_s = time.monotonic() - self._every_s
        while run not in self.latest or self._ruled_s < oldest_s:
            if self._next is None or self._next.done():
                self._next = asyncio.ensure_future(self._rule_anew())
            await asyncio.shield(self._next)
        return self.latest[run]

    async def _rule_anew(self) -> None:
        wait_s = self._began_s + self._every_s - time.monotonic()
        await asyncio.sleep(max(0.0, wait_s))
        began_s = time.monotonic()
        self._began_s = began_s
        self.latest = await asyncio.to_thread(self._rule)
        self._ruled_s = began_s
