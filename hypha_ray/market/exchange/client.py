"""A run's side of the exchange, and its opening and closing. Without an open exchange all this costs one look-up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.market.exchange.actor import Exchange
from hypha_ray.market.exchange.allotment import Order, Ruling, Standing
from hypha_ray.market.nodes import cluster_nodes, own_node
from hypha_ray.market.requirements import NodeResources, worker_needs

EXCHANGE = "market"
"""Name of the exchange in the namespace of what belongs to no run."""
ATTEND_S = 5.0
"""Longest wait in seconds for a ruling."""
PATIENCE = 2
"""Waits in vain, one after the other, after which the exchange's process is replaced."""


class ExchangeClient:
    """Asks the exchange, if one is open, for rulings on a run."""

    def __init__(self, job: Job, run: str) -> None:
        needs = worker_needs(job)
        leased = tuple(need for need in needs if need.bundle())
        least = job.num_workers if job.run.mode == "replay" else job.resources.min_workers
        least = max(0, least - (len(needs) - len(leased)))
        self._standing = Standing(run, job.resources.worker_price.public_bid, leased, least)
        self._quota = self._vain = self._refused = 0

    async def attend(self, begun: bool) -> Ruling | None:
        """Ruling on the run; the last quota while the exchange doesn't answer, and None if none is open."""
        exchange = await asyncio.to_thread(_exchange)
        if exchange is None:
            self._quota = self._vain = self._refused = 0
            return None
        try:
            asked = exchange.attend.remote(replace(self._standing, begun=begun))
            ruling: Ruling = await asyncio.wait_for(asked, ATTEND_S)
        except TimeoutError:
            self._vain += 1
            if self._vain >= PATIENCE:
                self._vain = 0
                ray.kill(exchange, no_restart=False)
        except RayError:
            pass  # Its process has died, and Ray starts another one.
        else:
            self._quota, self._vain = ruling.quota, 0
            short = ruling.quota < self._standing.least
            self._refused = self._refused + (2 if ruling.leave else 1) if short else 0
            return ruling
        return Ruling(self._quota)

    @property
    def is_outbid(self) -> bool:
        """Whether a ruling has taken workers that the run needs, or two in a row have left it too few."""
        return self._refused >= 2


def open_exchange(order: Order) -> bool:
    """Open the exchange of the cluster; False if there is one."""
    if _exchange() is not None:
        return False
    place = NodeAffinitySchedulingStrategy(own_node(), soft=True)
    options = {"name": EXCHANGE, "namespace": CLUSTER, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    exchange = ray.remote(Exchange).options(**options, get_if_exists=True, scheduling_strategy=place).remote(order)
    ray.get(exchange.ping.remote())
    return True


def close_exchange() -> bool:
    """Close the exchange of the cluster; False if there is none."""
    exchange = _exchange()
    if exchange is not None:
        ray.kill(exchange)
        request_resources(bundles=[])
    return exchange is not None


def standings() -> list[tuple[Standing, int]] | None:
    """Standing and quota of each run at the exchange; None if none is open."""
    exchange = _exchange()
    return None if exchange is None else ray.get(exchange.overview.remote(), timeout=ATTEND_S)


def possible_nodes() -> list[NodeResources]:
    """Nodes of the cluster; as if they were idle with an open exchange, because a run may wait for them there."""
    nodes = cluster_nodes()
    return nodes if _exchange() is None else [replace(node, free=node.total) for node in nodes]


def _exchange() -> Any | None:
    with suppress(ValueError):
        return ray.get_actor(EXCHANGE, namespace=CLUSTER)
    return None
