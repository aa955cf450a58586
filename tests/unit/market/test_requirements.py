"""What a job needs and whether nodes offer it: every figure can be worked out by hand."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, ConfigError
from hypha_ray.market.requirements import (
    Need,
    NodeResources,
    generators_with_room,
    needs,
    server_need,
    shortage,
    worker_needs,
    workers_to_start,
)


def node(address: str = "10.0.0.1", labels: dict[str, str] | None = None, **total: float) -> NodeResources:
    return NodeResources(address, total, total, labels or {})


def job(**resources: object) -> Job:
    return Job.model_validate({"resources": resources})


def test_bundle_all_resources_named_as_ray_names_them() -> None:
    assert Need("worker", 2, 0.5, 8_000_000_000).bundle() == {"CPU": 2, "GPU": 0.5, "memory": 8e9}


def test_bundle_nothing_reserved_is_empty() -> None:
    assert server_need(Job()).bundle() == {}


def test_worker_need_guides_names_count_too() -> None:
    need, _ = worker_needs(job(min_memory_mb=8000, min_gpus=1, gpu_type="nvidia"))
    assert need == Need("worker", 1.0, 1.0, 8_000_000_000, "nvidia")


def test_needs_one_server_for_each_fragment() -> None:
    one = Job.model_validate({"sync": {"fragments": 3}, "resources": {"num_workers": 5}})
    assert sorted((need.role, count) for need, count in needs(one, 5).items()) == [("server", 3), ("worker", 5)]


@pytest.mark.parametrize(
    "resources", [{"gpu": 1.5}, {"gpu_type": "in(a,b)"}, {"gpu_type": "!h100"}, {"gpu_type": "-h100"}]
)
def test_worker_need_unusable_value_is_a_config_error(resources: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="CFG003"):
        worker_needs(job(worker=resources))


def test_shortage_everything_fits_is_none() -> None:
    assert shortage({Need("worker", 1): 3, Need("server"): 1}, [node(CPU=1), node(CPU=2)]) is None


def test_shortage_too_few_gpus_names_resource_node_and_number() -> None:
    nodes = [node("10.0.0.3", CPU=8), node("10.0.0.4", CPU=8, GPU=1)]
    missing = shortage({Need("worker", 1, gpu=1): 3}, nodes)
    assert missing is not None
    assert not missing.busy
    assert str(missing) == ("1 GPU per worker is needed; the closest node, 10.0.0.4, has 0 of its 1 left; 2 of 3 short")
    assert str(missing.error()).startswith("error[CFG004]: the cluster is too small: 1 GPU per worker")
    assert missing.error().exit_code == 75


def test_shortage_room_taken_by_others_is_busy_not_too_small() -> None:
    missing = shortage({Need("worker", 2): 1}, [NodeResources("10.0.0.1", {"CPU": 4}, {"CPU": 0.5})])
    assert missing is not None
    assert missing.busy
    assert "has 0.5 of its 4 left" in str(missing)
    assert "the cluster is busy" in str(missing.error())


def test_shortage_memory_is_told_in_gigabytes() -> None:
    missing = shortage({Need("worker", 1, memory_bytes=64 * 10**9): 1}, [node(CPU=1, memory=24.5e9)])
    assert "64 GB of memory per worker is needed; the closest node, 10.0.0.1, has 24.5 of its 24.5 left" in str(missing)


def test_shortage_actors_are_not_split_over_nodes() -> None:
    assert shortage({Need("worker", 2): 1}, [node(CPU=1), node(CPU=1)]) is not None


def test_shortage_tenths_add_up_to_a_whole() -> None:
    assert shortage({Need("worker", 0.1): 10}, [node(CPU=1)]) is None
    assert shortage({Need("worker", 0.1): 11}, [node(CPU=1)]) is not None


def test_shortage_a_thousand_million_workers_is_told_at_once() -> None:
    missing = shortage({Need("worker", 1): 10**9}, [node(CPU=4)])
    assert missing is not None
    assert missing.short == 10**9 - 4


def test_shortage_no_node_says_so() -> None:
    assert str(shortage({Need("server"): 1}, [])) == "there is no node; 1 of 1 short"


@pytest.mark.parametrize(
    ("labels", "gpu_type"),
    [
        ({"gpu_type": "h100"}, "h100"),
        ({"ray.io/accelerator-type": "H200"}, "H200"),
        ({"ray.io/accelerator-type": "H200"}, "nvidia"),
        ({"ray.io/accelerator-type": "AMD-Instinct-MI300X-OAM"}, "amd"),
        ({}, None),
    ],
)
def test_shortage_label_that_names_the_type_is_taken(labels: dict[str, str], gpu_type: str | None) -> None:
    assert shortage({Need("worker", 1, 1, gpu_type=gpu_type): 1}, [node(labels=labels, CPU=1, GPU=1)]) is None


@pytest.mark.parametrize(
    ("labels", "gpu_type"),
    [
        ({"gpu_type": "a100"}, "h100"),
        ({"ray.io/accelerator-type": "AMD-Instinct-MI300X-OAM"}, "nvidia"),
        ({"ray.io/accelerator-type": "Intel-GPU-Max-1550"}, "nvidia"),
        ({"ray.io/accelerator-type": "H200"}, "amd"),
        ({}, "nvidia"),
    ],
)
def test_shortage_other_label_is_refused(labels: dict[str, str], gpu_type: str) -> None:
    missing = shortage({Need("worker", 1, 1, gpu_type=gpu_type): 1}, [node(labels=labels, CPU=1, GPU=1)])
    assert f"no node has gpu_type {gpu_type} for a worker" in str(missing)
    assert all(label in str(missing) for label in labels.values())


def test_worker_need_any_gpu_takes_every_node() -> None:
    assert worker_needs(job(worker={"gpu": 1.0, "gpu_type": "any"}))[0].gpu_type is None


def test_selector_owners_label_before_rays() -> None:
    own = node(labels={"gpu_type": "nvidia"}, GPU=1)
    found = [node(labels={"ray.io/accelerator-type": kind}, GPU=1) for kind in ("L4", "H100", "AMD-Instinct-MI210")]
    need = Need("worker", gpu=1, gpu_type="nvidia")
    assert need.selector([own, *found]) == {"gpu_type": "in(nvidia)"}
    assert need.selector(found) == {"ray.io/accelerator-type": "in(H100,L4)"}
    assert need.selector([]) == {"gpu_type": "in(nvidia)"}


def test_workers_to_start_as_many_as_fit() -> None:
    assert workers_to_start(job(num_workers=8, min_workers=2), [node(CPU=2), node(CPU=3)]) == [0, 1, 2, 3, 4]
    assert workers_to_start(job(num_workers=3, min_workers=2), [node(CPU=2), node(CPU=3)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("cores", "fitting"),
    [([4], 2), ([3], 1), ([2], 0), ([1], 0), ([2, 1, 1, 1], 3), ([1, 1, 0.5], 0)],
)
def test_generators_find_room_beside_the_workers_that_do(cores: list[float], fitting: int) -> None:
    wanted = Job.model_validate({"resources": {"num_workers": 2}, "rl": {"generators": 3}})
    assert generators_with_room(wanted, [node(CPU=count) for count in cores]) == fitting


def test_generators_find_no_room_where_too_few_workers_do() -> None:
    resources = {"num_workers": 2, "min_workers": 2, "worker": {"cpu": 4.0}}
    wanted = Job.model_validate({"resources": resources, "rl": {"generators": 3}})
    assert generators_with_room(wanted, [node(CPU=7)]) == 0


def test_workers_to_start_room_for_the_server_is_kept() -> None:
    assert workers_to_start(job(num_workers=4, parameter_server={"cpu": 1.0}), [node(CPU=4)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("groups", "fitting"),
    [
        ([{"count": 2, "gpu": 1}, {"count": 3}], [2, 3, 4]),  # A group without room hides none behind it.
        ([{"count": 9}, {"count": 2, "cpu": 0.5}], [0, 1, 2, 3]),  # The first group has all that there is.
        ([{"count": 2, "cpu": 3}, {"count": 2}], [0, 2]),
        ([{"cpu": 3}, {"cpu": 8}, {"cpu": 3}, {"cpu": 1}], [0, 3]),  # Equal needs of two groups add up.
    ],
)
def test_workers_to_start_in_groups_are_counted_in_each(groups: list[dict[str, float]], fitting: list[int]) -> None:
    assert workers_to_start(Job.model_validate({"workers": groups}), [node(CPU=4)]) == fitting


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_workers_to_start_beside_servers_is_the_most_that_fits(
    rooms: list[tuple[int, int]], worker: int, server: int, servers: int, count: int
) -> None:
    nodes = [NodeResources(f"n{at}", {"CPU": cpu}, {"CPU": min(cpu, free)}) for at, (cpu, free) in enumerate(rooms)]
    tables = {"num_workers": count, "worker": {"cpu": worker}, "parameter_server": {"cpu": server}}
    one = Job.model_validate({"resources": tables, "sync": {"fragments": servers}})
    fitting = [many for many in range(1, count + 1) if shortage(needs(one, many), nodes) is None]
    if fitting:
        assert workers_to_start(one, nodes) == list(range(max(fitting)))
    else:
        with pytest.raises(CapacityError):
            workers_to_start(one, nodes)


def test_workers_to_start_fewer_than_the_least_is_an_error() -> None:
    with pytest.raises(CapacityError, match="2 of 4 short"):
        workers_to_start(job(num_workers=8, min_workers=4), [node(CPU=2)])


amounts = st.integers(0, 4)


@given(st.lists(amounts, max_size=4), st.integers(1, 3), st.integers(0, 8))
def test_shortage_equal_needs_is_exact(cores: list[int], each: int, wanted: int) -> None:
    nodes = [node(CPU=core) for core in cores]
    room = sum(core // each for core in cores)
    missing = shortage({Need("worker", each): wanted}, nodes)
    assert (missing.short if missing else 0) == max(0, wanted - room)


@given(st.lists(st.tuples(amounts, amounts), min_size=1, max_size=2), st.lists(st.tuples(amounts, amounts), max_size=4))
def test_shortage_a_fit_that_it_finds_exists(rooms: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    nodes = [node(CPU=cpu, GPU=gpu) for cpu, gpu in rooms]
    wanted = {Need(f"role-{index}", cpu, gpu): 1 for index, (cpu, gpu) in enumerate(asked)}
    if shortage(wanted, nodes) is None:
        assert any(_fits(asked, rooms, homes) for homes in product(range(len(rooms)), repeat=len(asked)))


def _fits(asked: list[tuple[int, int]], rooms: list[tuple[int, int]], homes: tuple[int, ...]) -> bool:
    used = [
        [sum(need[kind] for need, home in zip(asked, homes, strict=True) if home == at) for kind in (0, 1)]
        for at in range(len(rooms))
    ]
    return all(use[kind] <= room[kind] for use, room in zip(used, rooms, strict=True) for kind in (0, 1))


@given(st.permutations([Need("a", 2), Need("b", 1, 1), Need("c", 3, 2), Need("d")]))
def test_shortage_order_of_needs_does_not_matter(order: list[Need]) -> None:
    nodes = [node(CPU=3, GPU=2), node(CPU=3, GPU=1)]
    assert shortage(dict.fromkeys(order, 1), nodes) is None
    assert str(shortage(dict.fromkeys(order, 1), nodes[:1])) == str(
        shortage(dict.fromkeys(next(permutations(sorted(order, key=lambda n: n.role))), 1), nodes[:1])
    )
