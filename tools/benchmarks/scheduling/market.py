"""Cost of the market: of a hire without owners' terms, of leases through an auction, and of a selection.

Five workers are hired at once, each on a placement group of its own. `hire` is a job's own way over bare calls of Ray,
where no owner has terms and no auction is open: from the first look to the last worker's answer. Ways take turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.config.resources import MarketStrategy
from hypha_ray.market.allocator import Leases
from hypha_ray.market.auction import AuctionClient, close_auction, open_auction
from hypha_ray.market.leases import LeaseRequest
from hypha_ray.market.requirements import ID_LABEL, Need, NodeResources
from hypha_ray.market.selection import Preference, choose_machines

WORKERS = 5
TURNS = 9
WARM = 1
"""Turns that count, and those before them."""
NODES = 10_000
WANTED = 1_000
STRATEGIES: tuple[MarketStrategy, ...] = ("cheapest", "value", "near", "spread")
DEADLINE_S = 60.0
NEED = Need("worker", 1.0)
RUN = "bench"
NAMES = [f"worker-{number}" for number in range(WORKERS)]
JOB = Job.model_validate({"run": {"name": RUN}, "resources": {"num_workers": WORKERS, "min_workers": WORKERS}})
Way = Callable[[], Awaitable[float]]


class _Worker:
    """Answers, and does nothing else."""

    def ping(self) -> None:
        """Answer."""


async def _bare() -> float:
    """Time of a hire by Ray alone."""
    began = time.perf_counter()
    groups = list[Any]()

    async def hire(name: str) -> None:
        group = placement_group([NEED.bundle()], "PACK", f"{RUN}/{name}")
        groups.append(group)
        await group.ready()
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        worker = ray.remote(_Worker).options(num_cpus=NEED.cpu, scheduling_strategy=strategy).remote()
        await worker.ping.remote()

    await asyncio.gather(*map(hire, NAMES))
    passed = time.perf_counter() - began
    for group in groups:
        remove_placement_group(group)
    return passed


async def _leased(starts: bool) -> float:
    """Time of a hire as a job does it, or of its leases alone."""
    leases = Leases(RUN)
    began = time.perf_counter()
    leases.obey(await AuctionClient(JOB, RUN).attend(has_begun=False))

    async def hire(name: str) -> None:
        lease = await leases.acquire(name, NEED, DEADLINE_S)
        if starts:
            worker = ray.remote(_Worker).options(**leases.options(lease)).remote()
            await worker.ping.remote()

    await asyncio.gather(*map(hire, NAMES))
    passed = time.perf_counter() - began
    leases.release_all()
    return passed


async def _through_auction() -> float:
    """Time of leases through an auction, which is opened before and closed afterwards."""
    open_auction("bid")
    passed = await _leased(starts=False)
    close_auction()
    return passed


def market() -> dict[str, dict[str, Any]]:
    """Time of a hire over that by Ray alone, of leases through an auction over those without, and of a selection."""
    ray.init(num_cpus=4 * WORKERS, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    try:
        hired = asyncio.run(_turns({"ours": lambda: _leased(starts=True), "bare": _bare}))
        leased = asyncio.run(_turns({"through": _through_auction, "direct": lambda: _leased(starts=False)}))
    finally:
        ray.shutdown()
    return {"hire": _ratio(hired, "<= 1.05"), "exchange_leases": _auction_row(leased), **_selection()}


def _ratio(times: Mapping[str, float], target: str) -> dict[str, Any]:
    (_, first), (_, second) = times.items()
    shown = {f"{name}_ms": round(1e3 * passed, 1) for name, passed in times.items()}
    return {"value": first / second, "target": target, **shown, "workers": WORKERS, "turns": TURNS}


def _auction_row(times: Mapping[str, float]) -> dict[str, Any]:
    more_s = times["through"] - times["direct"]
    return {**_ratio(times, "+<= 0.5 s"), "more_s": round(more_s, 3)}


async def _turns(ways: Mapping[str, Way]) -> dict[str, float]:
    """Median time of each way in seconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + TURNS):
        order = list(ways)[:: 1 if turn % 2 else -1]
        for name in order:
            passed = await ways[name]()
            if turn >= WARM:
                times[name].append(passed)
    return {name: median(seconds) for name, seconds in times.items()}


def _selection() -> dict[str, dict[str, Any]]:
    """Longest CPU time of a selection among many nodes, of all strategies."""
    dice = random.Random(0)
    times = dict[str, float]()
    nodes = [
        NodeResources(
            f"10.0.{number // 256}.{number % 256}",
            {"CPU": 8.0},
            {"CPU": float(dice.randint(0, 8))},
            {ID_LABEL: str(number), "price": f"{dice.uniform(1, 9):.2f}", "site": f"site-{dice.randint(0, 9)}"},
        )
        for number in range(NODES)
    ]
    for strategy in STRATEGIES:
        began = time.process_time()
        choose_machines([(LeaseRequest(NEED, 100.0, 100.0), WANTED)], nodes, Preference(strategy, sites={"site-0"}))
        times[f"{strategy}_s"] = round(time.process_time() - began, 3)
    row = {"value": max(times.values()), "target": "<= 1 s", **times, "nodes": NODES, "leases": WANTED}
    return {"selection_10000": row}
