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

from hypha_ray.children import ListedActor
from hypha_ray.market.auction.allotment import Allotment, Holding, Order, Ruling, Standing
from hypha_ray.market.auction.attendance import CHECK_S, Attendance, Rulings
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, reclaim


class Auction(ListedActor):
    """Rules on the runs of a cluster; an asynchronous actor.

    Args:
        order: "bid" serves the highest bid first; "fair" gives each run a share in the ratio of its bid.

    """

    def __init__(self, order: Order) -> None:
        self._order = order
        runs_with_terms = {entry.run for entry in lease_entries() if entry.agreement is not None}
        self._attendance = Attendance(time.monotonic(), runs_with_terms)
        self._lock = Lock()
        """Guards attendance, and the runs that have spoken since the last ruling began."""
        self._new_runs = set[str]()
        self._rulings = Rulings(self._rule)
        self._demand: list[dict[str, float]] | None = None
        """Bundles that Ray's autoscaler was asked for last; None before the first time."""
        Thread(target=self._check, name="auction-check", daemon=True).start()

    async def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    async def attend(self, standing: Standing) -> Ruling:
        """Record the standing of a run, and return the ruling on it."""
        with self._lock:
            self._attendance.record(standing, time.monotonic())
            self._new_runs.add(standing.run)
        return await self._rulings.of(standing.run)

    async def overview(self) -> list[tuple[Standing, Ruling]]:
        """Standing of each run and ruling on it, in the order in which they came."""
        await asyncio.to_thread(self._forget_ended)
        with self._lock:
            standings = self._attendance.standings
            rulings = self._rulings.latest
        return [(standing, rulings[standing.run]) for standing in standings if standing.run in rulings]

    def _rule(self) -> dict[str, Ruling]:
        """Look at the cluster, and rule on all runs that speak."""
        with self._lock:
            new_runs = self._new_runs
            self._new_runs = set()
        self._forget_ended(new_runs)
        with self._lock:
            standings = self._attendance.standings
        leases = holdings(lease_entries(), standings)
        rulings = Allotment(cluster_nodes(), standings, leases, self._order).rulings()
        self._ask_for_machines(standings, rulings)
        return rulings

    def _forget_ended(self, new_runs: Collection[str] = ()) -> None:
        """Forget runs that have no actors any more; those that have just spoken have some."""
        runs_with_actors = {actor["namespace"] for actor in list_named_actors(all_namespaces=True)}
        with self._lock:
            self._attendance.forget_all_but(runs_with_actors.union(new_runs, self._new_runs))

    def _ask_for_machines(self, standings: Sequence[Standing], rulings: Mapping[str, Ruling]) -> None:
        """Ask Ray's autoscaler for room for all workers, as long as some of them have none."""
        demand = []
        is_short = False
        for standing in standings:
            if standing.run in rulings:
                demand += [need.bundle() for need in standing.needs]
                is_short = is_short or rulings[standing.run].quota < len(standing.needs)
        if not is_short:
            demand = []
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
                    standings = self._attendance.standings
                self._ask_for_machines(standings, self._rulings.latest)


def holdings(entries: Sequence[LeaseEntry], standings: Sequence[Standing]) -> dict[str, list[Holding]]:
    """Leases of the runs' workers that are placed."""
    leases: dict[str, list[Holding]] = {}
    reported_since_s: dict[str, Mapping[str, float]] = {}
    for standing in standings:
        leases[standing.run] = []
        reported_since_s[standing.run] = standing.since_s
    for entry in entries:
        if entry.run in leases and entry.node is not None and entry.name.startswith("worker-"):
            if entry.agreement is not None:
                since_s = entry.agreement.since_s
            else:
                since_s = reported_since_s[entry.run].get(entry.name, 0.0)
            leases[entry.run].append(Holding(entry.name, entry.node, entry.amounts, since_s))
    return leases
