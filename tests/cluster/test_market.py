"""Machines with prices on a real cluster: chosen by price, pinned, and changed while the cluster runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.state import actors

from hypha_ray.config.resources import Resources
from hypha_ray.data.catalogue import load
from hypha_ray.driver.cluster_offers import lines, overview, post
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.errors import CapacityError, ConfigError
from hypha_ray.market.allocator import Lease, Leases
from hypha_ray.market.buyer import trades
from hypha_ray.market.cluster import cluster_nodes, lease_entries, own_node, post_labels, reclaim, speeds_of
from hypha_ray.market.requirements import Need
from hypha_ray.market.selection import UNKNOWN
from tests.support.clusters import cluster_of, until
from tests.support.faults import events
from tests.support.jobs import job_of, run_job

WAIT_S = 30.0
TERMS = ({"price": "5"}, {"price": "1"}, {"price": "2"}, {"price": "3", "floor": "200"}, {"price": "4"})
NEED = Need("worker", 1.0)


@pytest.fixture(scope="module")
def five() -> Iterator[list[str]]:
    """Ids of five nodes with a CPU each, whose owners ask 5, 1, 2, 3 with a floor of 200, and 4."""
    with cluster_of([{"num_cpus": 1, "labels": terms} for terms in TERMS]):
        asked = {node["Labels"].get("price"): node["NodeID"] for node in ray.nodes()}
        yield [asked[terms["price"]] for terms in TERMS]


@pytest.fixture
def nodes(five: list[str]) -> Iterator[list[str]]:
    """The same, without leases and with the terms of their labels."""
    yield five
    for run in ("run", "other"):
        reclaim(run)
    for node in five:
        post_labels(node, {})


def acquire(leases: Leases, *names: str, wait_s: float = WAIT_S) -> list[Lease]:
    async def all_at_once() -> list[Lease]:
        return list(await asyncio.gather(*(leases.acquire(name, NEED, wait_s) for name in names)))

    return asyncio.run(all_at_once())


def test_leases_are_on_the_cheapest_nodes_that_accept_the_bid(nodes: list[str]) -> None:
    leases = Leases("run")
    held = acquire(leases, "worker-0", "worker-1", "worker-2")
    assert sorted(leases.placed().values()) == sorted([nodes[1], nodes[2], nodes[4]])
    found = {entry["name"]: entry for entry in overview()["leases"]}
    assert sorted(entry["price"] for entry in found.values()) == [1.0, 2.0, 4.0]
    assert {entry["bid"] for entry in found.values()} == {100.0}
    assert list(lines(overview()))[-1] == "6 machines, 3 leases; 7 per hour"
    place = leases.placed()[held[0].holder]

    @ray.remote
    def where() -> str:
        return str(ray.get_runtime_context().get_node_id())

    assert ray.get(where.options(**leases.options(held[0])).remote(), timeout=WAIT_S) == place


def test_terms_posted_later_take_the_place_of_labels(nodes: list[str]) -> None:
    assert post(nodes[1], {"price": "9"}).endswith(": price 9")
    leases = Leases("run", Resources.model_validate({"worker_price": {"bid": 8.0, "max": 8.0}}))
    acquire(leases, "worker-0", "worker-1", "worker-2")
    assert sorted(leases.placed().values()) == sorted([nodes[2], nodes[4], nodes[0]])
    with pytest.raises(CapacityError, match="no node is cheap enough — got 9 per hour at the cheapest, allowed 8"):
        acquire(leases, "worker-3", wait_s=0.1)
    post(nodes[1], {"accepts": "none"})
    machine = next(machine for machine in overview()["nodes"] if machine["node"] == nodes[1])
    assert machine["terms"] == {"accepts": "none", "price": "1"}
    with pytest.raises(CapacityError, match="owners' terms leave 0 of 1 workers"):
        acquire(leases, "worker-3", wait_s=0.1)


def test_lease_that_another_run_was_faster_with_goes_to_the_next_node(nodes: list[str]) -> None:
    first, second = Leases("run"), Leases("other")

    async def both() -> None:
        names = ["worker-0", "worker-1"]
        await asyncio.gather(*(leases.acquire(name, NEED, WAIT_S) for leases in (first, second) for name in names))

    asyncio.run(both())
    places = [*first.placed().values(), *second.placed().values()]
    assert sorted(places) == sorted([nodes[1], nodes[2], nodes[4], nodes[0]])


def test_successor_adopts_leases_with_their_prices(nodes: list[str]) -> None:
    limit = Resources.model_validate({"max_price_per_hour": 3.5})
    acquire(Leases("run", limit), "worker-0", "worker-1")
    successor = Leases("run", limit)
    assert set(successor.adopt({"worker-0": NEED, "worker-1": NEED, "worker-2": NEED})) == {"worker-0", "worker-1"}
    with pytest.raises(CapacityError, match="max_price_per_hour pays for 0 of 1 workers"):
        acquire(successor, "worker-2", wait_s=0.1)


def test_whole_node_is_leased_with_all_that_it_has(nodes: list[str]) -> None:
    post(nodes[0], {"price": "0.5", "offer": "whole"})
    leases = Leases("run")
    (lease,) = acquire(leases, "worker-0")
    total = next(node.total for node in cluster_nodes() if node.id == nodes[0])
    assert leases.placed() == {"worker-0": nodes[0]}
    assert lease.amounts == {"CPU": 1.0, "memory": total["memory"]}


def test_post_of_a_node_that_is_not_there_lists_those_that_are(nodes: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"--node f00 names 0 machines — allowed .*{nodes[4][:8]}"):
        post("f00", {"price": "1"})
    assert not trades(Resources(), [node for node in cluster_nodes() if node.id == own_node()])


def test_job_trains_on_the_nodes_that_it_pays_for(nodes: list[str], corpus: Path, tmp_path: Path) -> None:
    run = run_job(job_of("paid", corpus, resources={"num_workers": 2, "max_price_per_hour": 3.0}), tmp_path, corpus)
    places = {actor["Name"]: actor["Address"]["NodeID"] for actor in actors().values()}
    assert {places["worker-0"], places["worker-1"]} == {nodes[1], nodes[2]}
    assert len(run.commits()) == 3
    assert set(run.used().values()) == {1}
    assert overview()["leases"] == []


def test_withdrawn_machine_gets_its_workers_delta_and_the_run_tells_its_cost(
    nodes: list[str], corpus: Path, tmp_path: Path
) -> None:
    """A second worker is on the machine at 2 an hour, until its owner wants that back in the second round."""
    rounds = {"update_rounds": 4, "samples_between_updates": 240, "max_batch_size": 4, "evaluate_every": 0}
    job = job_of("withdrawn", corpus, rounds=rounds, testing={"batch_s": 0.2})
    withdrawn: list[int] = []
    posted_s: list[float] = []
    since: dict[tuple[str, float], float] = {}
    """Price of each lease by its name and beginning, as Ray's table of placement groups has them."""

    def seen(record: dict[str, Any]) -> None:
        since.update(
            ((entry.name, entry.agreement.since_s), entry.agreement.price)
            for entry in lease_entries("withdrawn")
            if entry.agreement is not None
        )
        if not withdrawn and (record["kind"], record.get("round")) == ("step", 1):
            places = {actor["Name"]: actor["Address"]["NodeID"] for actor in actors().values()}
            withdrawn.append(next(worker for worker in (0, 1) if places[f"worker-{worker}"] == nodes[2]))
            post(nodes[2], {"max_lease_s": "0"})
            posted_s.append(time.monotonic())

    run = run_job(job, tmp_path, corpus, seen=seen)
    told = [(event["worker"], event["reason"]) for event in events(run, "leaving")]
    assert told == [(withdrawn[0], "its owner lets the machine no longer")]
    assert [event["worker"] for event in events(run, "leave")] == withdrawn and not events(run, "loss")
    assert set(run.used().values()) == {1}
    leaver = events(run, "leaving")[0]["incarnation"]
    deltas = [delta for commit in run.commits() for delta in commit["deltas"]]
    assert [one["samples"] for one in deltas if (one["worker"], one["incarnation"]) == (withdrawn[0], leaver)][-1] > 0
    assert sum(record["cost"] for record in run.of_kind("round")) <= run.records[-1]["cost"]

    assert sorted(one["price"] for one in events(run, "lease")) == sorted(since.values()) == [1.0, 2.0, 4.0]
    end, (left,) = max(event["monotonic_s"] for event in events(run, "cost")), events(run, "leave")
    assert left["monotonic_s"] - posted_s[0] <= 35
    first = min(begun_s for name, begun_s in since if name == f"worker-{withdrawn[0]}")
    ends = {(f"worker-{withdrawn[0]}", first): left["monotonic_s"]}
    cost = sum(price * (ends.get(key, end) - key[1]) / 3600 for key, price in since.items())
    assert run.records[-1]["cost"] == pytest.approx(cost, rel=0.01)

    # Its workers took 0.2 s for each batch of four samples, which a later job of the same training goes by.
    later = job.model_copy(update={"resources": job.resources.model_copy(update={"strategy": "value"})})
    speeds = speeds_of(later, load(corpus).shapes)
    assert all(5 < speed <= 4 / 0.2 for speed in speeds.by_place.values())
    until(lambda: {node.id: node.free["CPU"] for node in cluster_nodes()}[nodes[1]] == 1)
    told = [line for line in machine_lines(later, cluster_nodes(), own_node(), speeds) if f"({nodes[1][:8]})" in line]
    assert len(told) == 1 and " samples/s, measured, room for 1; 1 chosen" in told[0]
    assert speeds_of(later, {"input_ids": (64,)}) == speeds_of(job, load(corpus).shapes) == UNKNOWN


@pytest.mark.long
def test_run_ends_at_its_last_commit_before_its_budget_is_spent(nodes: list[str], corpus: Path, tmp_path: Path) -> None:
    """Two machines for 3 an hour together, and money for some twenty seconds of them: a round takes two."""
    rounds = {"update_rounds": 40, "samples_between_updates": 80, "max_batch_size": 4, "evaluate_every": 0}
    goal = {"at_most": 3 * 20 / 3600}
    run = run_job(job_of("frugal", corpus, rounds=rounds, goal=goal, testing={"batch_s": 0.2}), tmp_path, corpus)
    (stop,) = events(run, "stop")
    assert stop["reason"].startswith("goal.at_most = 0.0166667 pays for no further round; 0.01")
    assert 2 <= len(run.commits()) < 40
    assert set(run.used().values()) == {1}
    assert 0.5 * goal["at_most"] < run.records[-1]["cost"] <= goal["at_most"]


@pytest.mark.long
def test_run_says_early_that_its_deadline_cannot_be_kept_and_goes_on(
    nodes: list[str], corpus: Path, tmp_path: Path
) -> None:
    rounds = {"update_rounds": 4, "samples_between_updates": 80, "max_batch_size": 4, "evaluate_every": 0}
    job = job_of("late", corpus, rounds=rounds, goal={"by": "1s"}, testing={"batch_s": 0.2})
    run = run_job(job, tmp_path, corpus)
    assert len(run.commits()) == 4
    late = [event["text"] for event in events(run, "problem") if "goal.by" in event["text"]]
    assert len(late) == 1 and late[0].startswith("at this rate the run ends after ")
    assert events(run, "goal")[-1]["spare_s"] < 0
