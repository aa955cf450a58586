"""Workers that a job can hire on the terms of five nodes."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.errors import CapacityError
from hypha_ray.market.buyer import workers_to_hire
from hypha_ray.market.requirements import NodeResources, workers_to_start
from tests.unit.market.nodes import node


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
