"""Leases on a real cluster of three nodes: one plain, one with a GPU by its owner's label, one by Ray's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from hypha_ray.config import Job
from hypha_ray.config.value_types import CLUSTER
from hypha_ray.errors import CapacityError, ClusterError
from hypha_ray.market.allocator import Lease, Leases
from hypha_ray.market.allotment import Standing
from hypha_ray.market.auction import AUCTION, AuctionClient, close_auction, holdings, open_auction
from hypha_ray.market.cluster import cluster_nodes, lease_entries, post_labels, reclaim
from hypha_ray.market.requirements import Need, NodeResources
from tests.support.clusters import until

T = TypeVar("T")
STORE_BYTES = 80_000_000
WAIT_S = 30.0


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[dict[str, str]]:
    """Node ids by a name of ours."""
    store = {"object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **store})
    owned = cluster.add_node(num_cpus=1, num_gpus=1, labels={"gpu_type": "h100", "site": "a"}, wait=False, **store)
    found = cluster.add_node(num_cpus=1, num_gpus=1, labels={"ray.io/accelerator-type": "L4"}, wait=False, **store)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, namespace="leases", log_to_driver=False)
    yield {"plain": cluster.head_node.node_id, "owned": owned.node_id, "found": found.node_id}
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def leases() -> Iterator[Leases]:
    yield Leases("run")
    for name in ("run", "run-2"):
        reclaim(name)


@ray.remote
class Tenant:
    def where(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def assigned(self) -> dict[str, float]:
        return ray.get_runtime_context().get_assigned_resources()


@ray.remote
class Landlord:
    """Holds a lease as the scheduler does: from inside an asyncio actor."""

    def __init__(self, run: str) -> None:
        self._leases = Leases(run)

    async def acquire(self, name: str, need: Need) -> Lease:
        return await self._leases.acquire(name, need, WAIT_S)

    async def where(self) -> str:
        return ray.get_runtime_context().get_node_id()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def state(name: str) -> str:
    """State of the newest group of that name."""
    rows = [row for row in placement_group_table().values() if row["name"] == name]
    alive = [row["state"] for row in rows if row["state"] != "REMOVED"]
    return alive[0] if alive else rows[0]["state"]


def tenant(leases: Leases, lease: Lease) -> Any:
    return Tenant.options(**leases.options(lease)).remote()


def cpus_free() -> float:
    return sum(node.free.get("CPU", 0.0) for node in cluster_nodes())


def dead(actor: Any) -> bool:
    """Whether Ray has confirmed an actor's end; until then it calls it unavailable."""
    try:
        ray.get(actor.where.remote(), timeout=WAIT_S)
    except ActorUnavailableError:
        return False
    except ActorDiedError:
        return True
    return False


def test_cluster_nodes_have_totals_free_amounts_and_labels() -> None:
    found = {node.labels.get("gpu_type"): node for node in cluster_nodes()}
    assert set(found) == {None, "h100"}
    owned = found["h100"]
    assert isinstance(owned, NodeResources)
    assert (owned.total["CPU"], owned.total["GPU"], owned.labels["site"]) == (1.0, 1.0, "a")


def test_acquire_actor_gets_what_was_leased(leases: Leases) -> None:
    lease = run(leases.acquire("worker-0", Need("worker", 1.0, 0.5, 50_000_000), WAIT_S))
    amounts = ray.get(tenant(leases, lease).assigned.remote(), timeout=WAIT_S)
    assert (amounts["CPU"], amounts["GPU"], amounts["memory"]) == (1.0, 0.5, 50_000_000.0)
    assert state("run/worker-0") == "CREATED"


@pytest.mark.parametrize(("gpu_type", "home"), [("h100", "owned"), ("L4", "found"), ("nvidia", "found")])
def test_acquire_gpu_type_leads_to_the_node_with_that_label(
    leases: Leases, nodes: dict[str, str], gpu_type: str, home: str
) -> None:
    lease = run(leases.acquire("worker-0", Need("worker", gpu=1.0, gpu_type=gpu_type), WAIT_S))
    assert ray.get(tenant(leases, lease).where.remote(), timeout=WAIT_S) == nodes[home]


def test_release_ends_the_actor_and_frees_name_and_room(leases: Leases) -> None:
    need = Need("worker", 2.0)
    first = run(leases.acquire("worker-0", need, WAIT_S))
    actor = tenant(leases, first)
    ray.get(actor.where.remote(), timeout=WAIT_S)
    leases.release(first)
    leases.release(first)
    until(lambda: dead(actor))
    second = run(leases.acquire("worker-0", need, WAIT_S))
    assert (second.fence, state("run/worker-0")) == (2, "CREATED")
    leases.release(first)
    assert ray.get(tenant(leases, second).where.remote(), timeout=WAIT_S)


def test_options_after_release_refuses_instead_of_hanging(leases: Leases) -> None:
    lease = run(leases.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    leases.release(lease)
    with pytest.raises(ClusterError, match="run/worker-0 is over"):
        leases.options(lease)


def test_options_group_removed_by_somebody_else_refuses(leases: Leases) -> None:
    lease = run(leases.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    assert reclaim("run") == 1
    with pytest.raises(ClusterError, match="run/worker-0 is over"):
        leases.options(lease)


def test_acquire_more_than_any_node_has_tells_what_is_missing(leases: Leases) -> None:
    with pytest.raises(CapacityError) as caught:
        run(leases.acquire("worker-7", Need("worker", 1.0, gpu=4.0), deadline_s=0.2))
    text = str(caught.value)
    assert text.startswith("error[CFG004]: the cluster is too small: 4 GPU per worker is needed")
    assert "has 1 of its 1 left; 1 of 1 short" in text
    assert state("run/worker-7") == "REMOVED"


def test_acquire_label_that_no_node_has_tells_which_there_are(leases: Leases) -> None:
    with pytest.raises(CapacityError, match="no node has gpu_type b200 for a worker; the labels there: L4, h100"):
        run(leases.acquire("worker-7", Need("worker", 1.0, gpu_type="b200"), deadline_s=0.2))
    assert state("run/worker-7") == "REMOVED"


def test_acquire_room_held_by_another_run_is_called_busy(leases: Leases) -> None:
    other = Leases("run-2")
    run(other.acquire("worker-0", Need("worker", 2.0), WAIT_S))
    with pytest.raises(CapacityError, match="the cluster is busy: 2 CPU per worker is needed"):
        run(leases.acquire("worker-0", Need("worker", 2.0), deadline_s=0.5))
    other.release_all()
    assert run(leases.acquire("worker-0", Need("worker", 2.0), WAIT_S)).holder == "worker-0"


def test_acquire_more_than_all_nodes_together_is_counted_over_the_run(leases: Leases) -> None:
    async def hire(count: int) -> list[Lease | BaseException]:
        need = Need("worker", 1.0)
        asked = (leases.acquire(f"worker-{number}", need, 2.0) for number in range(count))
        return await asyncio.gather(*asked, return_exceptions=True)

    results = run(hire(6))
    errors = [result for result in results if isinstance(result, BaseException)]
    assert sum(isinstance(result, Lease) for result in results) == 4
    assert [type(error) for error in errors] == [CapacityError] * 2
    assert all("the cluster is too small: 1 CPU per worker is needed" in str(error) for error in errors)
    assert any("2 of 6 short" in str(error) for error in errors)


def test_acquire_that_waits_does_not_hold_up_the_event_loop(leases: Leases) -> None:
    async def both() -> list[str]:
        order: list[str] = []

        async def one(name: str, cpu: float, deadline_s: float) -> None:
            try:
                await leases.acquire(name, Need("worker", cpu), deadline_s)
            except CapacityError:
                order.append(f"{name} refused")
            else:
                order.append(f"{name} leased")

        await asyncio.gather(one("worker-0", 64.0, 3.0), one("worker-1", 1.0, WAIT_S))
        return order

    assert run(both()) == ["worker-1 leased", "worker-0 refused"]


def test_acquire_cancelled_leaves_no_group(leases: Leases) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(leases.acquire("worker-8", Need("worker", 64.0), WAIT_S))
        while not any(row["name"] == "run/worker-8" for row in placement_group_table().values()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
    assert state("run/worker-8") == "REMOVED"


def test_release_all_ends_leases_and_those_who_wait(leases: Leases) -> None:
    async def end() -> None:
        held = await leases.acquire("worker-0", Need("worker", 1.0), WAIT_S)
        task = asyncio.create_task(leases.acquire("worker-9", Need("worker", 64.0), WAIT_S))
        while not any(row["name"] == "run/worker-9" for row in placement_group_table().values()):
            await asyncio.sleep(0)
        leases.release_all()
        with pytest.raises(ClusterError, match="run/worker-9"):
            await task
        with pytest.raises(ClusterError, match="run/worker-0 is over"):
            leases.options(held)

    run(end())
    assert {state("run/worker-0"), state("run/worker-9")} == {"REMOVED"}


def test_acquire_name_in_use_is_refused(leases: Leases) -> None:
    held = run(leases.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    for again in (leases, Leases("run")):
        with pytest.raises(ClusterError, match="run/worker-0"):
            run(again.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    assert ray.get(tenant(leases, held).where.remote(), timeout=WAIT_S)


def test_reclaim_leases_of_a_killed_creator_are_free_again(leases: Leases) -> None:
    landlord = Landlord.options(num_cpus=0).remote("run")
    need = Need("worker", 2.0)
    ray.get(landlord.acquire.remote("worker-0", need), timeout=WAIT_S)
    bystander = Leases("run-2")
    run(bystander.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    ray.kill(landlord)
    until(lambda: dead(landlord))
    assert state("run/worker-0") == "CREATED"

    assert reclaim("run") == 1
    assert reclaim("run") == 0
    assert run(leases.acquire("worker-0", need, WAIT_S)).holder == "worker-0"
    assert state("run-2/worker-0") == "CREATED"


def test_lease_ended_gives_its_room_back_to_the_cluster(leases: Leases) -> None:
    run(leases.acquire("worker-0", Need("worker", 2.0), WAIT_S))
    until(lambda: cpus_free() == 2.0)
    leases.release_all()
    until(lambda: cpus_free() == 4.0)


def test_reclaim_spares_placed_leases_of_the_names_it_is_told(leases: Leases) -> None:
    run(leases.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    run(leases.acquire("worker-1", Need("worker", 1.0), WAIT_S))
    placement_group([{"CPU": 1000}], name="run/worker-2")
    assert reclaim("run", {"worker-0", "worker-2"}) == 2
    assert state("run/worker-0") == "CREATED"
    until(lambda: state("run/worker-1") == state("run/worker-2") == "REMOVED")


def test_adopted_lease_of_a_killed_creator_keeps_its_tenant_until_it_is_released(leases: Leases) -> None:
    landlord, need = Landlord.options(num_cpus=0).remote("run"), Need("worker", 1.0)
    ray.get(landlord.acquire.remote("worker-0", need), timeout=WAIT_S)
    settler = leases.adopt({"worker-0": need, "worker-1": need})["worker-0"]
    living = tenant(leases, settler)
    node = ray.get(living.where.remote(), timeout=WAIT_S)
    ray.kill(landlord)
    until(lambda: dead(landlord))
    assert leases.placed()[settler.holder] == node and ray.get(living.where.remote(), timeout=WAIT_S) == node
    leases.release(settler)
    until(lambda: dead(living))
    assert state("run/worker-0") == "REMOVED"


def test_adopt_finds_nothing_where_nothing_is_placed(leases: Leases) -> None:
    placement_group([{"CPU": 1000}], name="run/worker-0")
    run(Leases("run-2").acquire("worker-1", Need("worker", 1.0), WAIT_S))
    assert leases.adopt({"worker-0": Need("worker", 1000.0), "worker-1": Need("worker", 1.0)}) == {}


def test_nodes_count_what_is_leased_here_as_free_and_what_others_lease_as_taken(leases: Leases) -> None:
    total = ray.cluster_resources()["CPU"]
    run(leases.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    run(Leases("run-2").acquire("worker-0", Need("worker", 1.0), WAIT_S))
    until(lambda: cpus_free() == total - 2)
    assert sum(node.free.get("CPU", 0.0) for node in leases.nodes()) == total - 1


@pytest.fixture
def posted(nodes: dict[str, str]) -> Iterator[dict[str, str]]:
    """Nodes whose posted terms are taken back at the end."""
    yield nodes
    for node in nodes.values():
        post_labels(node, {})


def test_owner_withdraws_a_machine_from_leases_that_began_without_terms(leases: Leases, posted: dict[str, str]) -> None:
    """One machine is withdrawn, one gets a floor above the bid, and the third one a floor that the bid reaches."""

    async def scene() -> list[dict[str, str]]:
        for number, need in enumerate([Need("worker", 2.0), *[Need("worker", 1.0, 1.0)] * 2]):
            await leases.acquire(f"worker-{number}", need, WAIT_S)
        found = [await leases.ending()]
        assert not leases.pays
        post_labels(posted["plain"], {"accepts": "none"})
        post_labels(posted["owned"], {"price": "5", "floor": "1000"})
        post_labels(posted["found"], {"price": "5", "floor": "100"})
        return [*found, await leases.ending()]

    before, after = run(scene())
    by_node = {node: name for name, node in leases.placed().items()}
    assert before == {}
    assert after == {
        by_node[posted["plain"]]: "its owner lets the machine no longer",
        by_node[posted["owned"]]: "the machine's floor is 1000 now, and the bid is 100",
    }
    assert leases.bill() is None and "price" not in leases.terms("worker-1")


def test_successor_holds_leases_that_began_without_terms_to_those_of_their_owners(
    leases: Leases, posted: dict[str, str]
) -> None:
    need = Need("worker", 2.0)
    run(leases.acquire("worker-0", need, WAIT_S))
    successor = Leases("run")
    assert set(successor.adopt({"worker-0": need})) == {"worker-0"}
    post_labels(posted["plain"], {"max_lease_s": "0"})
    assert run(successor.ending()) == {"worker-0": "its owner lets the machine no longer"}


def test_leases_taken_before_an_auction_opens_are_ordered_by_their_time(leases: Leases) -> None:
    for number in (1, 0):
        run(leases.acquire(f"worker-{number}", Need("worker", 1.0), WAIT_S))
    one = Standing("run", 10.0, (Need("worker", 1.0),) * 2, 1, since_s=leases.since_s)
    held = {entry.name: entry.since_s for entry in holdings(lease_entries("run"), [one])["run"]}
    assert held["worker-1"] < held["worker-0"]


@pytest.mark.parametrize("name", ["a/b;c", "run/worker-1;bid=oops;since=1", "run/worker", "run/worker-1/part"])
def test_groups_of_other_programs_are_no_leases_and_stay(leases: Leases, name: str) -> None:
    run(leases.acquire("worker-0", Need("worker", 1.0), WAIT_S))
    foreign = placement_group([{"CPU": 0.1}], "PACK", name)
    ray.get(foreign.ready(), timeout=WAIT_S)
    try:
        assert [entry.name for entry in lease_entries() if entry.run == "run"] == ["worker-0"]
        assert all(entry.run != "a" for entry in lease_entries())
        assert reclaim("run") == 1
        assert state(name) == "CREATED"
    finally:
        remove_placement_group(foreign)


def test_group_of_several_bundles_is_no_lease(leases: Leases) -> None:
    foreign = placement_group([{"CPU": 0.1}, {"CPU": 0.1}], "PACK", "run/worker-0")
    try:
        assert lease_entries("run") == []
    finally:
        remove_placement_group(foreign)


@pytest.fixture
def auction() -> Iterator[None]:
    assert open_auction("bid")
    yield
    close_auction()


def test_when_an_auction_opens_many_runs_that_ask_at_once_are_told_what_they_may_hold(auction: None) -> None:
    """Four CPUs are for the least workers of the four highest bids; all others hear that there is nothing for them."""

    def job(bid: int) -> Job:
        price = {"bid": float(bid), "max": 100.0}
        return Job.model_validate({"resources": {"num_workers": 4, "min_workers": 1, "worker_price": price}})

    clients = [AuctionClient(job(bid), f"run-{bid}") for bid in range(1, 21)]

    async def turn() -> list[int]:
        told = await asyncio.gather(*(client.attend(has_begun=False) for client in clients))
        return [ruling.quota for ruling in told if ruling is not None]

    until(lambda: run(turn()) == [0] * 16 + [1] * 4, WAIT_S)
    assert ray.get(ray.get_actor(AUCTION, namespace=CLUSTER).ping.remote(), timeout=WAIT_S) > 0
