"""A run's side of the auction, and its opening and closing. Without an open auction all this costs one look-up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.market.auction.actor import Auction
from hypha_ray.market.auction.allotment import Order, Ruling, Standing
from hypha_ray.market.cluster import cluster_nodes, own_node
from hypha_ray.market.requirements import NodeResources, worker_needs

AUCTION = "market"
"""Name of the auction in the namespace of what belongs to no run."""
ATTEND_S = 5.0
"""Longest wait in seconds for a ruling."""
PATIENCE = 2
"""Waits in vain, one after the other, after which the auction's process is replaced."""


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


def open_auction(order: Order) -> bool:
    """Open the auction of the cluster; False if there is one."""
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
    auction = ray.remote(Auction).options(**options).remote(order)
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
