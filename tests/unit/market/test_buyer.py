"""The buyer of a run: workers that it can hire on the terms of nodes, times and prices that it is told of."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.config.resources import Resources
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.errors import CapacityError
from hypha_ray.market.buyer import GRACE_S, LEFT_OUT_S, Agreement, Buyer, workers_to_hire
from hypha_ray.market.requirements import Need, NodeResources, workers_to_start
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


def five() -> list[NodeResources]:
    prices = ({"price": 5}, {"price": 1}, {"price": 2}, {"price": 3, "floor": 200}, {"price": 4})
    return [node(f"n{i}", **terms) for i, terms in enumerate(prices)]


def job(most: float = 100.0, **resources: Any) -> Job:
    return Job.model_validate({"resources": {"num_workers": 3, "worker_price": {"max": most}, **resources}})


def test_dry_run_lists_every_node_with_its_answer_and_the_sum_per_hour() -> None:
    assert list(machine_lines(job(), five(), "n0")) == [
        "offers for 3 × worker with 1 CPU, bid 100:",
        "  at-n0 (n0): 5 an hour each, room for 1; none chosen",
        "  at-n1 (n1): 1 an hour each, room for 1; 1 chosen",
        "  at-n2 (n2): 2 an hour each, room for 1; 1 chosen",
        "  at-n3 (n3): refused, the bid 100 is below its floor, 200",
        "  at-n4 (n4): 4 an hour each, room for 1; 1 chosen",
        "price: 7.00 an hour",
        "resources: 3 of 3 workers fit; nodes: 5",
    ]


def test_workers_without_terms_are_those_that_fit() -> None:
    nodes = [node("a", 2, site="eu"), node("b", 3)]
    one = job(num_workers=8, worker_price={"bid": 0.0, "max": 0.0}, max_price_per_hour=0.1)
    assert workers_to_hire(one, nodes, "a") == workers_to_start(one, nodes) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("one", "nodes", "error"),
    [
        (
            job(0.5),
            five(),
            "no node is cheap enough — got 1 per hour at the cheapest, allowed 0.5. Fix: raise resources",
        ),
        (
            job(1.5, min_workers=2),
            five(),
            "no further node is cheap enough — got 2 per hour at the cheapest, allowed 1.5",
        ),
        (
            job(min_workers=3, max_price_per_hour=6.9),
            five(),
            "resources.max_price_per_hour pays for 2 of 3 workers. Fix: raise it",
        ),
        (
            job(),
            [node("a", floor=200), node("b", accepts="server")],
            "owners' terms leave 0 of 1 workers — got at-a is refused: the bid 100 is below its floor, 200",
        ),
        (
            job(parameter_server={"cpu": 1.0}, parameter_server_price={"max": 1.0}),
            [node("a", 9, price=18)],
            "no node is cheap enough — got 2 per hour at the cheapest, allowed 1. Fix: raise resources.parameter_",
        ),
    ],
)
def test_too_few_workers_are_refused_with_the_reason(one: Job, nodes: list[NodeResources], error: str) -> None:
    with pytest.raises(CapacityError) as caught:
        workers_to_hire(one, nodes, "head")
    assert str(caught.value).startswith(f"error[CFG004]: {error}")
    assert caught.value.exit_code == 75


def test_nodes_that_are_too_small_are_told_as_without_terms() -> None:
    with pytest.raises(CapacityError, match="the cluster is too small: 4 CPU per worker is needed"):
        workers_to_hire(job(worker={"cpu": 4.0}), five(), "n0")


def test_fewer_workers_than_wanted_come_if_they_are_enough() -> None:
    assert workers_to_hire(job(2.5), five(), "n0") == [0, 1]
    assert workers_to_hire(job(max_price_per_hour=3.0), five(), "n0") == [0, 1]


def test_groups_choose_in_their_order_beside_workers_that_reserve_nothing() -> None:
    groups = [{"cpu": 2}, {"kind": "bridged"}, {"count": 2}]
    one = Job.model_validate({"workers": groups, "resources": {"max_price_per_hour": 3.0}})
    assert workers_to_hire(one, [node("a", 4, price=4)], "a") == [0, 1, 2]


def test_near_takes_nodes_of_the_schedulers_site_first() -> None:
    nodes = [node("a", 0, site="eu"), node("b", price=1, site="us"), node("c", price=5, site="eu")]
    lines = list(machine_lines(job(num_workers=1, strategy="near"), nodes, "a"))
    assert "  at-c (c): 5 an hour each, room for 1; 1 chosen" in lines


def test_dry_run_shows_no_price_where_no_owner_has_named_one() -> None:
    assert list(machine_lines(job(num_workers=1, strategy="spread"), [node("a")], "a")) == [
        "offers for 1 × worker with 1 CPU, bid 100:",
        "  at-a (a): no price, room for 1; 1 chosen",
        "resources: 1 of 1 workers fit; nodes: 1",
    ]
    lines = list(machine_lines(job(num_workers=1, strategy="spread"), [node("a", price=0)], "a"))
    assert lines[1:3] == ["  at-a (a): 0 an hour each, room for 1; 1 chosen", "price: 0.00 an hour"]
