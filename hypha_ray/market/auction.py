"""The auction: its actor, which hears the standing of each run and answers with a ruling, and a run's side of it.

Without an open auction all this costs one look-up. An auction may end at any time: leases stay, and the next auction
knows everything once each run has called again. There is one ruling on all runs a second at most, and answers come from
memory until the next:

of(run) ──► from memory, if the run was ruled on within the last second
└─────► otherwise the next ruling on all runs, at the earliest a second after the last one
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
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
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, own_node, reclaim
from hypha_ray.market.requirements import NodeResources, worker_needs

CHECK_S = 5.0
"""Seconds between two checks for silent runs."""
SILENT_S = 10.0
"""Seconds without a call after which a run's standing is forgotten; runs call every two seconds."""
TTL_S = 60.0
"""Seconds of silence after which a run's leases are to be ended; a scheduler is replaced in less."""
RULING_S = 1.0
"""Least time in seconds between two rulings, and the largest age of a ruling that is an answer."""
AUCTION = "market"
"""Name of the auction in the namespace of what belongs to no run."""
ATTEND_S = 5.0
"""Longest wait in seconds for a ruling."""
PATIENCE = 2
"""Number of successive waits without an answer after which the auction's process is replaced."""


class Attendance:
    """Keeps the latest standing of each run that calls; times are monotonic seconds, passed in.

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
        lost_runs = []
        for run in list(self._heard_s):
            heard_s = min(now, self._heard_s[run] + late_s)
            self._heard_s[run] = heard_s
            silence_s = now - heard_s
            if silence_s > SILENT_S:
                self._standings.pop(run, None)
            if silence_s > self._ttl_s:
                del self._heard_s[run]
                lost_runs.append(run)
        return lost_runs


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
        """Guards attendance, and the runs that have called since the last ruling began."""
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
        """Forget runs without actors; runs that have just called have actors."""
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
        """End the leases of runs that no longer call, in a separate thread."""
        while True:
            time.sleep(CHECK_S)
            with suppress(RayError):  # The control service doesn't answer: there will be a next check.
                with self._lock:
                    silent_runs = self._attendance.check(time.monotonic())
                for run in silent_runs:
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
        leased_needs = {worker: need for worker, need in enumerate(needs) if need.bundle()}
        without_lease = len(needs) - len(leased_needs)
        least_workers = job.num_workers if job.run.mode == "replay" else job.resources.min_workers
        least_workers = max(0, least_workers - without_lease)
        bid = job.resources.worker_price.public_bid
        self.standing = Standing(run, bid, tuple(leased_needs.values()), least_workers, numbers=tuple(leased_needs))
        self._last = Ruling(0)
        """Last ruling, without leases to hand back."""
        self._timeouts = 0
        """Number of successive waits without an answer."""
        self._refusals = 0
        """Successive rulings that leave the run too few workers; one that takes leases counts twice."""

    async def attend(self, has_begun: bool, since_s: Mapping[str, float] | None = None) -> Ruling | None:
        """Ruling on the run; the last quota while the auction doesn't answer, and None if none is open.

        Args:
            has_begun: whether the run has committed a round.
            since_s: monotonic times by name since which the run has leases.

        """
        auction = await asyncio.to_thread(_auction)
        if auction is None:
            self._last = Ruling(0)
            self._timeouts = 0
            self._refusals = 0
            return None
        try:
            standing = replace(self.standing, begun=has_begun, since_s=dict(since_s or {}))
            ruling: Ruling = await asyncio.wait_for(auction.attend.remote(standing), ATTEND_S)
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= PATIENCE:
                self._timeouts = 0
                ray.kill(auction, no_restart=False)
        except RayError:
            pass  # The auction's process has died, and Ray starts another one.
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
