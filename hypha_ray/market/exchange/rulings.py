"""Rulings on all runs: one a second at most for all of them, and answers from memory until the next.

of(run) ──► from memory, if the run was ruled on within the last second
└─────► otherwise the next ruling on all runs, at the earliest a second after the last one
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from hypha_ray.market.exchange.allotment import Ruling

RULING_S = 1.0
"""Least time in seconds from one ruling to the next, and the age up to which one is told."""


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
        self._began_s = self._ruled_s = float("-inf")
        """Monotonic times at which the last ruling began, and the last one that came to its end."""
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
        await asyncio.sleep(max(0.0, self._began_s + self._every_s - time.monotonic()))
        self._began_s = began = time.monotonic()
        self.latest = await asyncio.to_thread(self._rule)
        self._ruled_s = began
