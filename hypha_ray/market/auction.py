"""A run's side of the auction, and its opening and closing. Without an open auction all this costs one look-up.

The auction's actor: hears the standing of each run, and answers with a ruling.

It may end at any time: leases stay, and the next one knows all once each run has spoken again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock, Thread
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.children import ListedActor
from hypha_ray.config import Job
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.market.allotment import Allotment, Holding, Order, Ruling, Standing
from hypha_ray.market.attendance import CHECK_S, TTL_S, Attendance, Rulings
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, own_node, reclaim
from hypha_ray.market.requirements import NodeResources, worker_needs

AUCTION = "market"
"""Name of the auction in the namespace of what belongs to no run."""
ATTEND_S = 5.0
"""Longest wait in seconds for a ruling."""
PATIENCE = 2
"""Waits in vain, one after the other, after which the auction's process is replaced."""


class Auction(ListedActor):
    """Rules on the runs of a cluster; an asynchronous actor.

    Args:
        order: "bid" serves the highest bid first; "fair" gives each run a share in the ratio of its bid.
        ttl_s: seconds of silence after which a run's leases end.

    """

    def __init__(self, order: Order, ttl_s: float = TTL_S) -> None:
        self._order = order
        runs_with_terms = {entry.run for entry in lease_entries() if entry.agreement is not None}
        self._attendance = Attendance(time.monotonic(), runs_with_terms, ttl_s)
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


class AuctionClient:
    """Asks the auction, if one is open, for rulings on a run."""

    def __init__(self, job: Job, run: str) -> None:
        needs = worker_needs(job)
        leased_needs = {number: need for number, need in enumerate(needs) if need.bundle()}
        without_lease = len(needs) - len(leased_needs)
        least = job.num_workers if job.run.mode == "replay" else job.resources.min_workers
        least = max(0, least - without_lease)
        bid = job.resources.worker_price.public_bid
        self.standing = Standing(run, bid, tuple(leased_needs.values()), least, numbers=tuple(leased_needs))
        self._last = Ruling(0)
        """Last ruling, without leases to hand back."""
        self._timeouts = 0
        """Number of waits in vain, one after the other."""
        self._refusals = 0
        """Successive rulings that leave the run too few workers; one that takes leases counts twice."""

    async def attend(self, begun: bool, since_s: Mapping[str, float] | None = None) -> Ruling | None:
        """Ruling on the run; the last quota while the auction doesn't answer, and None if none is open.

        Args:
            begun: whether the run has committed a round.
            since_s: monotonic times by name since which the run has leases.

        """
        auction = await asyncio.to_thread(_auction)
        if auction is None:
            self._last = Ruling(0)
            self._timeouts = 0
            self._refusals = 0
            return None
        try:
            standing = replace(self.standing, begun=begun, since_s=dict(since_s or {}))
            ruling: Ruling = await asyncio.wait_for(auction.attend.remote(standing), ATTEND_S)
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= PATIENCE:
                self._timeouts = 0
                ray.kill(auction, no_restart=False)
        except RayError:
            pass  # Its process has died, and Ray starts another one.
        else:
            self.record(ruling)
            return ruling
        return self._last

    def record(self, ruling: Ruling) -> None:
        """Keep a ruling, and count those that leave the run too few workers because another one comes before it."""
        self._last = replace(ruling, leave={})
        self._timeouts = 0
        if ruling.quota >= self.standing.least:
            self._refusals = 0
        elif ruling.leave:
            self._refusals += 2
        elif ruling.behind is not None:
            self._refusals += 1
        else:
            self._refusals = 0

    @property
    def is_outbid(self) -> bool:
        """Whether a ruling has taken workers that the run needs, or another run waits for them in two in a row."""
        return self._refusals >= 2


def open_auction(order: Order, ttl_s: float = TTL_S) -> bool:
    """Open the auction of the cluster, see `Auction`; False if there is one."""
    if _auction() is not None:
        return False
    options = {
        "name": AUCTION,
        "namespace": CLUSTER,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "get_if_exists": True,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(own_node(), soft=True),
    }
    auction = ray.remote(Auction).options(**options).remote(order, ttl_s)
    ray.get(auction.ping.remote())
    return True


def close_auction() -> bool:
    """Close the auction of the cluster; False if there is none."""
    auction = _auction()
    if auction is not None:
        ray.kill(auction)
        request_resources(bundles=[])
    return auction is not None


def standings() -> list[tuple[Standing, Ruling]] | None:
    """Standing of each run at the auction and ruling on it; None if none is open."""
    auction = _auction()
    if auction is None:
        return None
    overview: list[tuple[Standing, Ruling]] = ray.get(auction.overview.remote(), timeout=ATTEND_S)
    return overview


def possible_nodes() -> list[NodeResources]:
    """Nodes of the cluster; as if they were idle with an open auction, because a run may wait for them there."""
    nodes = cluster_nodes()
    if _auction() is None:
        return nodes
    return [replace(node, free=node.total) for node in nodes]


def _auction() -> Any | None:
    with suppress(ValueError):
        return ray.get_actor(AUCTION, namespace=CLUSTER)
    return None
