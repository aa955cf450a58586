"""Answers of a node to a request: prices and refusals that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from hypha_ray.market.leases import LeaseRequest, Offer, Refusal, Terms, answers, are_posted, evaluate, read_terms
from hypha_ray.market.requirements import Need, NodeResources
from tests.unit.market.nodes import node

WORKER = LeaseRequest(Need("worker", cpu=1), bid=10, max_price=10)


def answer(request: LeaseRequest, of: NodeResources) -> Offer | Refusal:
    (found,) = answers(request, [of])
    return found


def test_offer_of_a_part_costs_its_share_and_has_room_for_what_is_free() -> None:
    found = answer(WORKER, node("a", cpus=4, free=3, price=8))
    assert isinstance(found, Offer)
    assert (found.price, found.capacity, found.amounts) == (2.0, 3, {"CPU": 1})


def test_offer_costs_the_largest_share_of_cpus_gpus_and_memory() -> None:
    total = {"CPU": 8.0, "GPU": 2.0, "memory": 16e9}
    of = NodeResources("a", total, total, {"price": "8"})
    for need, price in (
        (Need("worker", 1, 1), 4.0),
        (Need("worker", 1, 0.5), 2.0),
        (Need("worker", 1, memory_bytes=12 * 10**9), 6.0),
        (Need("worker", 8, 2, 10**9), 8.0),
    ):
        found = evaluate(of, Terms(price=8), LeaseRequest(need, 100, 100))
        assert isinstance(found, Offer) and found.price == price


def test_offer_of_a_whole_node_has_all_of_it_for_one_lease_at_the_whole_price() -> None:
    total = {"CPU": 8.0, "memory": 16e9, "node:10.0.0.1": 1.0}
    found = answer(WORKER, NodeResources("a", total, total, {"price": "8", "offer": "whole"}))
    assert isinstance(found, Offer)
    assert (found.price, found.capacity, found.amounts) == (8.0, 1, {"CPU": 8.0, "memory": 16e9})


def test_node_without_terms_costs_nothing_and_accepts_all() -> None:
    for role in ("worker", "server"):
        found = answer(LeaseRequest(Need(role, 1), 0, 0), node("a", cpus=2, site="eu"))
        assert isinstance(found, Offer) and (found.price, found.capacity) == (0.0, 2)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (node("a", accepts="server"), "its owner accepts no worker"),
        (node("a", accepts="none"), "its owner accepts no worker"),
        (node("a", max_lease_s=0), "its owner lets it no longer"),
        (node("a", cpus=0.5), "it is too small: 0.5 CPU in all"),
        (node("a", free=0.5), "it has too little left: 0.5 CPU"),
        (node("a", free=0), "it has too little left: nothing"),
        (node("a", cpus=4, free=3, offer="whole"), "it is let as a whole, and is in use"),
        (node("a", floor=11), "the bid 10 is below its floor, 11"),
        (node("a", price=10.5), "it asks 10.5, and 10 is the most to be paid"),
        (node("a", price="cheap"), "its label price = cheap can't be used"),
        (node("a", price=-1), "its label price = -1 can't be used"),
        (node("a", offer="half"), "its label offer = half can't be used"),
        (node("a", accepts="workers"), "its label accepts = workers can't be used"),
    ],
)
def test_refusal_names_its_reason(of: NodeResources, reason: str) -> None:
    found = answer(WORKER, of)
    assert isinstance(found, Refusal) and found.reason == reason
    assert found.ask == (10.5 if "asks" in reason else None)


def test_floor_holds_for_the_share_that_is_asked_for() -> None:
    assert isinstance(answer(WORKER, node("a", cpus=4, floor=40)), Offer)
    assert isinstance(answer(WORKER, node("a", cpus=4, floor=44)), Refusal)


def test_server_is_refused_where_leases_end() -> None:
    found = answer(LeaseRequest(Need("server", 1), 10, 10), node("a", max_lease_s=3600))
    assert isinstance(found, Refusal) and found.reason == "its leases end after 3600 s, and a server stays"
    assert isinstance(answer(WORKER, node("a", max_lease_s=3600)), Offer)


def test_gpu_type_is_compared_with_all_nodes_as_without_a_market() -> None:
    found = answers(LeaseRequest(Need("worker", 1, gpu_type="h100"), 1, 1), [node("a", gpu_type="h100"), node("b")])
    assert [type(one) for one in found] == [Offer, Refusal]


def test_terms_are_posted_by_any_of_their_labels_but_a_site_is_only_a_place() -> None:
    assert not are_posted(node("a", site="eu").labels)
    assert all(are_posted({name: "1"}) for name in ("price", "floor", "offer", "accepts", "max_lease_s", "throughput"))


def test_terms_of_labels() -> None:
    labels = {"price": "0.5", "accepts": "worker_server", "max_lease_s": "60", "site": "eu", "ray.io/node-id": "f00"}
    assert read_terms(labels) == Terms(price=0.5, max_lease_s=60, site="eu")
    assert Terms().max_lease_s == math.inf
