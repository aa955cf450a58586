"""The auction's actor: hears the standing of each run, and answers with a ruling.

It may end at any time: leases stay, and the next one knows all once each run has spoken again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from threading import Lock, Thread

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util import list_named_actors

from hypha_ray.market.auction.allotment import Allotment, Holding, Order, Ruling, Standing
from hypha_ray.market.auction.attendance import CHECK_S, Attendance, Rulings
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, reclaim


class Auction:
    """Rules on the runs of a cluster; an asynchronous actor.

    Args:
        order: "bid" serves the highest bid first; "fair" gives each run a share in the ratio of its bid.

    """

    def __init__(self, order: Order) -> None:
        self._order = order
        agreed = {entry.run for entry in lease_entries() if entry.agreement is not None}
        self._attendance = Attendance(time.monotonic(), agreed)
        self._lock = Lock()
        """Guards attendance, and the runs that have asked since the last ruling began."""
        self._asked = set[str]()
        self._rulings = Rulings(self._rule)
        self._demand: list[dict[str, float]] | None = None
        """Bundles that Ray's autoscaler was asked for last; None before the first time."""
        Thread(target=self._check, name="auction-check", daemon=True).start()

    async def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    async def attend(self, standing: Standing) -> Ruling:
        """Take in the standing of a run, and tell it the ruling."""
        with self._lock:
            self._attendance.hear(standing, time.monotonic())
            self._asked.add(standing.run)
        return await self._rulings.of(standing.run)

    async def overview(self) -> list[tuple[Standing, Ruling]]:
        """Standing of each run and ruling on it, in the order in which they came."""
        await asyncio.to_thread(self._forget_ended)
        with self._lock:
            runs = self._attendance.standings
            rulings = self._rulings.latest
        return [(one, rulings[one.run]) for one in runs if one.run in rulings]

    def _rule(self) -> dict[str, Ruling]:
        """Look at the cluster, and rule on all runs that speak."""
        with self._lock:
            asked = self._asked
            self._asked = set()
        self._forget_ended(asked)
        with self._lock:
            runs = self._attendance.standings
        held = holdings(lease_entries(), runs)
        rulings = Allotment(cluster_nodes(), runs, held, self._order).rulings()
        self._ask_for_machines(runs, rulings)
        return rulings

    def _forget_ended(self, asked: Collection[str] = ()) -> None:
        """Forget runs that have no actors any more; those that ask now have some."""
        named = {actor["namespace"] for actor in list_named_actors(all_namespaces=True)}
        with self._lock:
            self._attendance.forget_all_but(named.union(asked, self._asked))

    def _ask_for_machines(self, runs: Sequence[Standing], rulings: Mapping[str, Ruling]) -> None:
        """Ask Ray's autoscaler for room for all workers, as long as some of them have none."""
        known = [one for one in runs if one.run in rulings]
        short = any(rulings[one.run].quota < len(one.needs) for one in known)
        demand = [need.bundle() for one in known for need in one.needs] if short else []
        if demand != self._demand:
            request_resources(bundles=demand)
            self._demand = demand

    def _check(self) -> None:
        """End the leases of runs that have fallen silent, in a thread of its own."""
        while True:
            time.sleep(CHECK_S)
            with suppress(RayError):  # The control service doesn't answer: there will be a next check.
                with self._lock:
                    silent = self._attendance.check(time.monotonic())
                for run in silent:
                    reclaim(run)
                self._forget_ended()
                with self._lock:
                    runs = self._attendance.standings
                self._ask_for_machines(runs, self._rulings.latest)


def holdings(entries: Sequence[LeaseEntry], runs: Sequence[Standing]) -> dict[str, list[Holding]]:
    """Leases of the runs' workers that are placed."""
    found: dict[str, list[Holding]] = {one.run: [] for one in runs}
    told_s = {one.run: one.since_s for one in runs}
    for entry in entries:
        if entry.run in found and entry.node is not None and entry.name.startswith("worker-"):
            known_s = told_s[entry.run].get(entry.name, 0.0)
            since_s = entry.agreement.since_s if entry.agreement else known_s
            found[entry.run].append(Holding(entry.name, entry.node, entry.amounts, since_s))
    return found
