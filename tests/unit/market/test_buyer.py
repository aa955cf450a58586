"""The buyer of a run, with the times and nodes that it is told of."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config.resources import Resources
from hypha_ray.errors import CapacityError
from hypha_ray.market.buyer import GRACE_S, LEFT_OUT_S, Agreement, Buyer
from hypha_ray.market.requirements import Need
from tests.unit.market.nodes import node

NEED = Need("worker", 1)


def buyer(**resources: Any) -> Buyer:
    return Buyer(Resources.model_validate(resources))


def chosen(
    buyer: Buyer, names: list[str], nodes: list[Any], placed: tuple[str, ...] = (), now: float = 0.0, need: Need = NEED
) -> dict[str, str]:
    """Node of each name that has found one."""
    found = buyer.choose(dict.fromkeys(names, need), nodes, "head", placed, now)
    return {name: offer.node.id for name, offer in found.items()}


def test_leases_asked_for_together_are_chosen_together() -> None:
    nodes = [node("a", 2, price=2), node("b", price=9), node("c", price=3)]
    assert chosen(buyer(), ["w0", "w1", "w2"], nodes) == {"w0": "a", "w1": "a", "w2": "c"}


def test_agreed_room_counts_as_taken_until_it_shows_on_the_node() -> None:
    one, nodes = buyer(), [node("a", price=1), node("b", price=2)]
    assert chosen(one, ["w0"], nodes) == {"w0": "a"}
    assert chosen(one, ["w1"], nodes) == {"w1": "b"}
    assert chosen(one, ["w2"], [node("a", free=0, price=1), node("b", 2, price=4)], ("w0",)) == {"w2": "b"}


def test_node_that_had_no_room_is_left_out_for_a_while() -> None:
    one, nodes = buyer(), [node("a", price=1), node("b", price=2)]
    one.fail("a", 5.0)
    assert chosen(one, ["w0"], nodes, now=5.1) == {"w0": "b"}
    one.end("w0", 6.0)
    assert chosen(one, ["w0"], nodes, now=5.0 + LEFT_OUT_S) == {"w0": "a"}


def test_budget_is_what_other_leases_of_the_run_leave() -> None:
    one, nodes = buyer(max_price_per_hour=5.0), [node("a", price=3), node("b", price=3)]
    assert chosen(one, ["w0", "w1"], nodes) == {"w0": "a"}
    assert chosen(one, ["w1"], nodes) == {}
    with pytest.raises(CapacityError, match="max_price_per_hour pays for 0 of 1 workers"):
        raise one.refusal(NEED, nodes, "head")
    one.end("w0", 6.0)
    assert chosen(one, ["w1"], nodes) == {"w1": "a"}


def test_adopted_lease_counts_for_the_budget_and_for_what_is_spread() -> None:
    one = buyer(max_price_per_hour=5.0, strategy="spread")
    one.adopt("w0", Agreement("a", "worker", {"CPU": 1.0}, 100.0, 2.0, 0.0))
    nodes = [node("a", 3, free=2, price=3), node("b", 3, price=6)]
    assert chosen(one, ["w1", "w2"], nodes, ("w0",)) == {"w1": "b", "w2": "a"}


def test_near_follows_the_sites_of_the_runs_leases() -> None:
    one = buyer(strategy="near")
    one.adopt("w0", Agreement("a", "worker", {"CPU": 1.0}, 100.0, 2.0, 0.0))
    nodes = [node("a", free=0, site="eu"), node("b", price=1, site="us"), node("c", price=5, site="eu")]
    assert chosen(one, ["w1"], nodes, ("w0",)) == {"w1": "c"}


def test_servers_choose_before_workers() -> None:
    one, nodes = buyer(parameter_server={"cpu": 1.0}), [node("a", price=1), node("b", price=2)]
    found = one.choose({"worker-0": NEED, "server-0": Need("server", 1)}, nodes, "head", (), 0.0)
    assert {name: offer.node.id for name, offer in found.items()} == {"server-0": "a", "worker-0": "b"}


def with_lease(now: float = 0.0, **terms: str | float) -> tuple[Buyer, Any]:
    """A buyer with one lease that begins at `now`, and its node."""
    one, on = buyer(), node("a", 4, price=8, **terms)
    assert chosen(one, ["worker-0"], [on], now=now) == {"worker-0": "a"}
    one.begin("worker-0")
    return one, on


def test_lease_without_an_end_stays() -> None:
    one, on = with_lease()
    assert one.ending([on], 1e9) == {} and one.over(1e9) == []


@pytest.mark.parametrize(("longest", "told", "over"), [(3600, 3570, 3600), (20, 10, 20)])
def test_longest_lease_gives_notice_before_it_is_over(longest: float, told: float, over: float) -> None:
    one, on = with_lease(now=100.0, max_lease_s=longest)
    assert one.ending([on], 100 + told - 0.1) == {}
    assert one.ending([on], 100 + told) == {"worker-0": f"its lease ends after {longest:g} s"}
    assert one.over(100 + over - 0.1) == []
    assert one.over(100 + over) == ["worker-0"]


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"accepts": "none", "max_lease_s": 0}, "its owner lets the machine no longer"),
        ({"max_lease_s": 0}, "its owner lets the machine no longer"),
        ({"accepts": "server"}, "its owner lets the machine no longer"),
        ({"floor": 440}, "the machine's floor is 110 now, and the bid is 100"),
    ],
)
def test_terms_that_no_longer_allow_a_lease_end_it_after_a_grace(terms: dict[str, Any], reason: str) -> None:
    one, _ = with_lease()
    now = [node("a", 4, free=3, price=8, **terms)]
    assert one.ending(now, 50.0) == {"worker-0": reason}
    assert one.ending(now, 60.0) == {"worker-0": reason}
    assert one.over(50.0 + GRACE_S - 0.1) == [] and one.over(50.0 + GRACE_S) == ["worker-0"]


def test_terms_that_only_cost_more_or_cannot_be_read_end_no_lease() -> None:
    one, _ = with_lease()
    for changed in (node("a", 4, price=800), node("a", 4, floor=400), node("a", 4, price="?", accepts="none")):
        assert one.ending([changed], 50.0) == {}


def test_notice_is_not_for_the_next_lease_of_the_name() -> None:
    one, _ = with_lease()
    one.ending([node("a", 4, accepts="none")], 50.0)
    one.end("worker-0", 55.0)
    assert chosen(one, ["worker-0"], [node("b", price=1)], now=55.0) == {"worker-0": "b"}
    assert one.ending([node("a", 4, accepts="none"), node("b", price=1)], 60.0) == {} and one.over(1e9) == []


def test_bill_is_price_times_hours_of_all_leases_since_the_last_one() -> None:
    one, nodes = buyer(), [node("a", 4, price=8), node("b", price=5)]
    assert one.bill(0.0) is None
    chosen(one, ["w0", "w1", "w2", "w3", "w4"], nodes, now=100.0)  # Four at 2, one at 5 an hour.
    for name in ("w0", "w1", "w4"):
        one.begin(name)
    one.end("w2", 1000.0)  # Chosen, and never placed.
    assert one.bill(3700.0) == pytest.approx(2 + 2 + 5)
    one.end("w1", 3700.0 + 1800)
    assert one.bill(3700.0 + 3600) == pytest.approx(2 + 1 + 5)
    assert one.bill(3700.0 + 3600) == 0.0


def test_adopted_lease_is_billed_from_its_beginning_or_from_the_last_bill_before() -> None:
    for billed_s, cost in ((0.0, 3.0), (3600.0, 2.0)):
        one = buyer()
        one.adopt("worker-0", Agreement("a", "worker", {"CPU": 1.0}, 100.0, 1.0, 0.0))
        one.billed(billed_s)
        assert one.bill(3 * 3600.0) == pytest.approx(cost)


def test_lease_whose_price_no_owner_has_named_is_not_billed_and_one_that_costs_nothing_is() -> None:
    for terms, cost in (({}, None), ({"floor": 1}, None), ({"price": 0}, 0.0)):
        one = buyer(strategy="spread")
        assert chosen(one, ["w0"], [node("a", **terms)]) == {"w0": "a"}
        one.begin("w0")
        agreed = one.agreement("w0")
        assert agreed is not None and (agreed.price, one.bill(3600.0)) == (cost, cost)
        successor = buyer()
        successor.adopt("w0", agreed)
        one.end("w0", 3600.0)
        assert successor.bill(3600.0) == one.bill(3600.0) == cost
