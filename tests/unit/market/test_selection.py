"""Selection among offers, held against all sets that there are, and measured speeds in it."""

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

from hypha_ray.config import Job
from hypha_ray.config.resources import MarketStrategy
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.market.leases import LeaseRequest, Offer, answers
from hypha_ray.market.requirements import GB, ID_LABEL, Need, NodeResources
from hypha_ray.market.selection import Preference, Speeds, choose_machines, places, select, training_key
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
CPU, GPU = {"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}
SHAPES = {"input_ids": (64,)}


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


def gpu_node(name: str, kind: str, **labels: str) -> NodeResources:
    has = {"CPU": 8.0, "GPU": 2.0, "memory": 64.0 * GB}
    return NodeResources(f"at-{name}", has, has, {ID_LABEL: name, "ray.io/accelerator-type": kind, **labels})


def value_job(workers: int = 1, **resources: Any) -> Job:
    tables = {"num_workers": workers, "strategy": "value", **resources}
    return Job.model_validate({"resources": tables, "model": {"repository": "m"}})


def offers_in(job: Job, nodes: list[NodeResources], **known: float) -> list[str]:
    """Lines of a dry run about nodes on which workers with one CPU were measured."""
    speeds = Speeds({f"{name}/1 CPU, 0 GPU": speed for name, speed in known.items()})
    return [line for line in machine_lines(job, nodes, "home", speeds) if line.startswith("  ")]


def test_speed_belongs_to_a_machine_and_to_its_kind_of_gpu() -> None:
    seen, other, older = gpu_node("a", "H100"), gpu_node("b", "H100"), gpu_node("c", "A100")
    speeds = Speeds(dict.fromkeys(places(seen, GPU), 50.0))
    assert [speeds.of(one, GPU) for one in (seen, other, older)] == [50.0, 50.0, None]
    assert speeds.of(seen, {"CPU": 2.0, "GPU": 2.0}) is None
    exact = Speeds({**speeds.by_place, places(other, GPU)[0]: 40.0})
    assert exact.of(other, GPU) == 40.0
    of_cpus = Speeds(dict.fromkeys(places(seen, CPU), 3.0))
    assert [of_cpus.of(one, CPU) for one in (seen, other)] == [3.0, None], "machines differ in their CPUs"


def test_owners_label_of_a_gpu_comes_before_rays() -> None:
    assert places(gpu_node("a", "H100", gpu_type="big"), GPU)[1] == "big/2 CPU, 1 GPU"


@pytest.mark.parametrize(
    ("table", "same"),
    [
        ({"rounds": {"update_rounds": 7, "samples_between_updates": 9}}, True),
        ({"resources": {"num_workers": 9}}, True),
        ({"worker": {"lease_s": 9.0}}, True),
        ({"inner_optimizer": {"learning_rate": 0.5}}, True),
        ({"rounds": {"max_batch_size": 8}}, False),
        ({"worker": {"autocast": "bf16"}}, False),
        ({"model": {"repository": "n"}}, False),
    ],
)
def test_training_is_the_same_as_long_as_its_batches_take_equally_long(table: dict[str, Any], same: bool) -> None:
    job = Job.model_validate({"model": {"repository": "m"}})
    other = Job.model_validate({"model": {"repository": "m"}, **table})
    assert (training_key(job, SHAPES) == training_key(other, SHAPES)) == same
    assert training_key(job, SHAPES) != training_key(job, {"input_ids": (128,)})


def test_value_goes_by_measured_speed_though_owners_state_another() -> None:
    nodes = [node("slow", price=1, throughput=9), node("fast", price=2, throughput=1)]
    assert offers_in(value_job(), nodes, slow=10.0, fast=30.0) == [
        "  at-slow (slow): 1 an hour each, for 10 samples/s, measured, room for 1; none chosen",
        "  at-fast (fast): 2 an hour each, for 30 samples/s, measured, room for 1; 1 chosen",
    ]


def test_machine_without_a_measured_speed_is_estimated_from_what_is_known_of_all() -> None:
    """Stated throughputs are 2, 4 and 8; the measured ones are 5 and 3 times as much, so the third is 4 · 8."""
    nodes = [node(name, price=4, throughput=speed) for name, speed in (("a", 2), ("b", 4), ("c", 8))]
    assert offers_in(value_job(), nodes, a=10.0, b=12.0)[2] == (
        "  at-c (c): 4 an hour each, for 32 samples/s, estimated from the stated throughput, room for 1; 1 chosen"
    )
    bare = [node("a", price=4), node("b", 2, price=6)]
    assert offers_in(value_job(), bare, a=10.0) == [
        "  at-a (a): 4 an hour each, for 10 samples/s, measured, room for 1; none chosen",
        "  at-b (b): 3 an hour each, for 10 samples/s, estimated from resources, room for 2; 1 chosen",
    ]


def test_without_any_measured_speed_value_goes_by_what_owners_state_or_by_resources() -> None:
    stated = [node("a", 2, price=4, throughput=8), node("b", price=1, throughput=1)]
    assert offers_in(value_job(), stated) == [
        "  at-a (a): 2 an hour each, for 4 of the stated throughput, room for 2; 1 chosen",
        "  at-b (b): 1 an hour each, for 1 of the stated throughput, room for 1; none chosen",
    ]
    bare = [node("a", price=4), node("b", floor=0)]
    assert offers_in(value_job(), bare) == [
        "  at-a (a): 4 an hour each, for 1 units of resources, room for 1; none chosen",
        "  at-b (b): no price, for 1 units of resources, room for 1; 1 chosen",
    ]


def test_speed_of_workers_says_nothing_of_servers_and_other_strategies_do_not_ask() -> None:
    nodes = [node("slow", 2, price=2), node("fast", 2, price=4)]
    lines = offers_in(value_job(parameter_server={"cpu": 1.0}), nodes, slow=1.0, fast=9.0)
    assert [line.rpartition("; ")[2] for line in lines] == ["1 chosen", "none chosen", "none chosen", "1 chosen"]
    lines = offers_in(value_job(strategy="cheapest"), nodes, slow=1.0, fast=9.0)
    assert lines[0] == "  at-slow (slow): 1 an hour each, room for 2; 1 chosen"
