"""Rulings of the auction in time, and a run's turn: the workers that a ruling allows, and those to give way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.market.allotment import Allotment, Holding, Ruling, Standing
from hypha_ray.market.auction import AuctionClient, Rulings
from hypha_ray.market.requirements import Need, NodeResources
from hypha_ray.scheduler.runtime.market_client import within
from tests.unit.market.nodes import node

RUNS = [f"run-{number}" for number in range(50)]
GPU, CORES, REMOTE = Need("worker", 1, 1), Need("worker", 4), Need("worker")
NEEDS = [GPU, GPU, CORES, CORES, REMOTE]


class Cluster:
    """Rules on the runs that have spoken, and counts how often; a later ruling has a larger quota."""

    def __init__(self) -> None:
        self.spoken, self.looks = list[str](), 0

    def rule(self) -> Mapping[str, Ruling]:
        self.looks += 1
        return dict.fromkeys(self.spoken, Ruling(self.looks))


async def asked(rulings: Rulings, cluster: Cluster, runs: list[str]) -> list[int]:
    """Quotas of runs that ask at the same time."""
    cluster.spoken += [run for run in runs if run not in cluster.spoken]
    return [ruling.quota for ruling in await asyncio.gather(*(rulings.of(run) for run in runs))]


def test_fifty_runs_that_ask_at_once_and_again_cost_one_ruling() -> None:
    async def scene() -> None:
        cluster = Cluster()
        rulings = Rulings(cluster.rule, every_s=600.0)
        for _ in range(4):
            assert await asked(rulings, cluster, RUNS) == [1] * 50
        assert cluster.looks == 1

    asyncio.run(scene())


def test_run_that_comes_between_two_rulings_is_ruled_on_in_the_next_one_with_all_others() -> None:
    async def scene() -> None:
        cluster = Cluster()
        rulings = Rulings(cluster.rule, every_s=0.2)
        began = asyncio.get_running_loop().time()
        assert await asked(rulings, cluster, ["first"]) == [1]
        assert await asked(rulings, cluster, RUNS) == [2] * 50
        assert asyncio.get_running_loop().time() - began >= 0.2
        assert rulings.latest["first"].quota == cluster.looks == 2

    asyncio.run(scene())


def test_ruling_that_is_older_than_the_interval_is_not_told_again() -> None:
    async def scene() -> None:
        cluster = Cluster()
        rulings = Rulings(cluster.rule, every_s=0.0)
        assert [await asked(rulings, cluster, ["run"]) for _ in range(3)] == [[1], [2], [3]]

    asyncio.run(scene())


def test_ruling_that_fails_is_told_to_those_that_wait_and_the_next_one_is_tried() -> None:
    async def scene() -> None:
        cluster, failures = Cluster(), [OSError("the control service doesn't answer")]

        def rule() -> Mapping[str, Ruling]:
            if failures:
                raise failures.pop()
            return cluster.rule()

        rulings = Rulings(rule, every_s=0.0)
        cluster.spoken = ["run"]
        found = await asyncio.gather(*(rulings.of("run") for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in found] == ["the control service doesn't answer"] * 3
        assert (await rulings.of("run")).quota == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("ruling", "fitting", "allowed"),
    [
        (Ruling(3, {}, {GPU: 1, CORES: 2}), [0, 1, 2, 3, 4], [0, 2, 3, 4]),
        (Ruling(3, {}, {GPU: 1, CORES: 2}), [1, 2, 3], [1, 2, 3]),
        (Ruling(2, {}, {GPU: 0, CORES: 2}), [0, 1, 4], [4]),
        (Ruling(0, {}, {GPU: 0, CORES: 0}), [0, 1, 2, 3, 4], [4]),
        (Ruling(2), [0, 1, 2, 3], [0, 1]),
    ],
)
def test_workers_within_a_ruling_are_counted_by_need(ruling: Ruling, fitting: list[int], allowed: list[int]) -> None:
    assert within(ruling, fitting, NEEDS) == allowed


def test_worker_is_allowed_as_long_as_its_need_and_the_quota_are_not_used_up() -> None:
    ruling = Ruling(2, {}, {GPU: 1, CORES: 2})
    assert ruling.allows(GPU, {}) and not ruling.allows(GPU, {GPU: 1})
    assert ruling.allows(CORES, {GPU: 1}) and not ruling.allows(CORES, {GPU: 1, CORES: 1})
    assert not ruling.allows(REMOTE, {})


class Auction:
    """A client of a run of three workers, which has committed nothing, and the rulings that it hears."""

    def __init__(self, bid: float = 10.0) -> None:
        resources = {"num_workers": 3, "min_workers": 3, "worker_price": {"bid": bid}}
        self.client = AuctionClient(Job.model_validate({"run": {"name": "x"}, "resources": resources}), "x")
        self.standing = Standing("x", bid, (Need("worker", 1.0),) * 3, 3, begun=False)

    def hear(self, nodes: list[NodeResources], *others: Standing, **held: Any) -> None:
        """Hear a ruling on the run, which has leases on the machines a and b."""
        mine = [Holding(f"worker-{i}", at, {"CPU": 1.0}, i) for i, at in enumerate("ab")]
        runs = [self.standing, *others]
        self.client.record(Allotment(nodes, runs, {"x": mine, **held}).rulings()["x"])


FULL = [node("a", free=0), node("b", free=0)]


def test_run_alone_that_has_lost_a_machine_is_not_outbid() -> None:
    run = Auction()
    for _ in range(5):
        run.hear(FULL)
    assert not run.client.is_outbid


def test_run_beside_one_that_bids_more_and_has_all_it_needs_is_not_outbid() -> None:
    run, full = Auction(), [*FULL, node("c", free=0)]
    for _ in range(5):
        run.hear(full, Standing("y", 20.0, (Need("worker", 1.0),), 1), y=[Holding("worker-0", "c", {"CPU": 1.0}, 0.0)])
    assert not run.client.is_outbid


def test_run_is_outbid_by_two_rulings_in_which_a_higher_bid_waits() -> None:
    run, waits = Auction(), Standing("y", 10.5, (Need("worker", 1.0),) * 4, 4)
    told = list[bool]()
    for others in ([waits], [], [waits], [waits]):
        run.hear(FULL, *others)
        told.append(run.client.is_outbid)
    assert told == [False, False, False, True]


def test_run_is_outbid_at_once_by_a_bid_that_takes_its_machines() -> None:
    run = Auction()
    run.hear(FULL, Standing("y", 20.0, (Need("worker", 1.0),) * 2, 2))
    assert run.client.is_outbid


def test_needs_at_the_auction_have_the_numbers_of_their_workers() -> None:
    groups = [{"count": 2, "kind": "bridged"}, {"count": 2, "cpu": 2}]
    job = Job.model_validate({"run": {"name": "x"}, "workers": groups})
    assert AuctionClient(job, "x").standing.needs_by_name == dict.fromkeys(["worker-2", "worker-3"], Need("worker", 2))
    assert Counter(AuctionClient(job, "x").standing.needs) == {Need("worker", 2): 2}
