"""Selection among offers, held against all sets that there are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha_ray.config.resources import MarketStrategy
from hypha_ray.market.leases import LeaseRequest, Offer, answers
from hypha_ray.market.requirements import Need, NodeResources
from hypha_ray.market.selection import Preference, choose_machines, select
from tests.support.mutants_market import MUTANTS, mutant
from tests.unit.market.nodes import node

REQUEST = LeaseRequest(Need("worker", 1), bid=1000, max_price=1000)
STRATEGIES: tuple[MarketStrategy, ...] = ("cheapest", "value", "near", "spread")
Machine: TypeAlias = tuple[int, int, str, int, str]
"""CPUs, price of each, offer, throughput and site of a node."""
NODES = st.lists(
    st.tuples(
        st.integers(1, 3),
        st.integers(0, 9),
        st.sampled_from(["whole", "flexible"]),
        st.integers(1, 3),
        st.sampled_from("xyz"),
    ),
    max_size=5,
)


SPEEDS = st.none() | st.lists(st.integers(1, 4), min_size=5, max_size=5)
"""Measured samples per second of a lease on each node; None: nothing was measured."""


def offers_of(machines: Sequence[Machine], speeds: Sequence[float] | None = None) -> list[Offer]:
    nodes = [
        node(f"n{i}", cpus, price=price * cpus, offer=offer, throughput=speed, site=site)
        for i, (cpus, price, offer, speed, site) in enumerate(machines)
    ]
    found = [answer for answer in answers(REQUEST, nodes) if isinstance(answer, Offer)]
    return found if speeds is None else [replace(offer, speed=speeds[int(offer.node.id[1:])]) for offer in found]


def ranks(
    strategy: str, offers: Sequence[Offer], counts: Sequence[int], held: dict[str, int]
) -> list[tuple[float, ...]]:
    """Ranks of a set of leases, so many on each node, from the best to the worst."""

    def of(offer: Offer, before: int) -> tuple[float, ...]:
        match strategy:
            case "cheapest":
                return (offer.price,)
            case "value" if offer.speed is not None:
                return offer.price / offer.speed, offer.price
            case "value":
                return offer.terms.price / offer.terms.throughput, offer.price
            case "near":
                return 0 if offer.terms.site == "x" else 1, offer.price
        return held.get(offer.node.id, 0) + before, offer.price

    return sorted(of(offer, before) for offer, count in zip(offers, counts, strict=True) for before in range(count))


def sets(offers: Sequence[Offer], wanted: int, budget: float) -> Iterator[tuple[int, ...]]:
    for counts in product(*(range(offer.capacity + 1) for offer in offers)):
        price = sum(count * offer.price for count, offer in zip(counts, offers, strict=True))
        if sum(counts) <= wanted and price <= budget + 1e-9:
            yield counts


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=200, deadline=None)
@given(
    machines=NODES,
    wanted=st.integers(0, 7),
    budget=st.just(math.inf) | st.integers(0, 40).map(float),
    held=st.dictionaries(st.sampled_from(["n0", "n1", "n2"]), st.integers(1, 2)),
    speeds=SPEEDS,
)
def test_selection_is_the_best_of_all_sets(
    strategy: MarketStrategy,
    machines: list[tuple[int, int, str, int, str]],
    wanted: int,
    budget: float,
    held: dict[str, int],
    speeds: list[int] | None,
) -> None:
    """The largest set that the budget allows, and of these the one with the best ranks in order."""
    examine(select, offers_of(machines, speeds), wanted, Preference(strategy, budget, {"x"}, held))


def examine(select: Any, offers: list[Offer], wanted: int, preference: Preference) -> None:
    strategy, held = preference.strategy, dict(preference.leases_by_node)
    chosen = select(offers, wanted, preference)
    counts = [sum(one is offer for one in chosen) for offer in offers]
    possible = list(sets(offers, wanted, preference.budget))
    size = max(sum(counts) for counts in possible)
    best = min(ranks(strategy, offers, counts, held) for counts in possible if sum(counts) == size)
    assert tuple(counts) in possible
    assert ranks(strategy, offers, counts, held) == best


@pytest.mark.parametrize("name", MUTANTS)
def test_defect_of_the_selection_shows_among_random_offers(name: str) -> None:
    defective = mutant(name)
    for seed in range(300):
        random = Random(seed)
        machines = [
            (
                random.randint(1, 3),
                random.randint(0, 9),
                random.choice(["whole", "flexible"]),
                random.randint(1, 3),
                site,
            )
            for site in random.choices("xyz", k=random.randint(1, 5))
        ]
        strategy: MarketStrategy = random.choice(STRATEGIES)
        budget = random.choice([math.inf, float(random.randint(0, 40))])
        held = {"n0": random.randint(0, 2), "n1": random.randint(0, 2)}
        preference = Preference(strategy, budget, {"x"}, held)
        speeds = random.choice([None, [random.randint(1, 4) for _ in range(5)]])
        try:
            examine(defective.select, offers_of(machines, speeds), random.randint(0, 7), preference)
        except Exception:
            return
    raise AssertionError("no set of offers shows it")


def five() -> list[NodeResources]:
    prices = ({"price": 5}, {"price": 1}, {"price": 2}, {"price": 3, "floor": 200}, {"price": 4})
    return [node(f"n{i}", **terms) for i, terms in enumerate(prices)]


def test_plan_chooses_the_cheapest_nodes_that_accept_the_bid() -> None:
    (choice,) = choose_machines([(LeaseRequest(Need("worker", 1), 100, 100), 3)], five(), Preference())
    assert [offer.node.id for offer in choice.chosen] == ["n1", "n2", "n4"]
    assert choice.price == 7.0


def test_plan_leaves_the_second_request_what_the_first_has_not_taken() -> None:
    nodes = [node("a", 3, price=3), node("b", 3, price=6)]
    requests = [(LeaseRequest(Need("server", 1), 9, 9), 1), (LeaseRequest(Need("worker", 1), 9, 9), 3)]
    server, workers = choose_machines(requests, nodes, Preference(budget=5.0))
    assert [offer.node.id for offer in server.chosen] == ["a"]
    assert [offer.node.id for offer in workers.chosen] == ["a", "a", "b"]
    assert server.price + workers.price == 5.0
    _, fewer = choose_machines(requests, nodes, Preference(budget=4.0))
    assert [offer.node.id for offer in fewer.chosen] == ["a", "a"]


def test_free_machines_are_taken_when_rounding_leaves_less_than_nothing_of_the_budget() -> None:
    offers = [
        offer for offer in answers(REQUEST, [node("free", 1), node("paid", 1, price=0.1)]) if isinstance(offer, Offer)
    ]
    assert [offer.node.id for offer in select(offers, 2, Preference(budget=0.3 - (0.1 + 0.2)))] == ["free"]


def test_value_without_measured_throughput_goes_by_what_is_leased() -> None:
    nodes = [node("small", 1, price=2), node("large", 8, price=8, offer="whole")]
    (choice,) = choose_machines([(REQUEST, 1)], nodes, Preference("value"))
    assert [offer.node.id for offer in choice.chosen] == ["large"]
