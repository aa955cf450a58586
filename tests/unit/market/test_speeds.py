"""Speeds that runs have measured, and what strategy value makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.driver.preflight.run_costs import machine_lines
from hypha_ray.market.requirements import GB, ID_LABEL, NodeResources
from hypha_ray.market.selection import Speeds, places, training_key
from tests.unit.market.nodes import node

CPU, GPU = {"CPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}
SHAPES = {"input_ids": (64,)}


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
