"""Batches on their way through a graph, over model workers in many layouts."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Mapping
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from hypha_ray.rl.dataflow.graph import Call, Graph, Mesh
from hypha_ray.rl.dataflow.master import Master
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker, Role, RoleOutcome
from hypha_ray.rl.dataflow.requests import Meta, RequestQueue, Sample
from tests.support.packed import packed

MESHES = [
    Mesh(tuple(range(first, first + dp * tp * pp)), tp, pp)
    for first, dp, tp, pp in ((0, 1, 1, 1), (0, 2, 1, 1), (0, 4, 1, 1), (2, 2, 2, 1), (1, 1, 2, 2), (3, 2, 1, 2))
]
GRAPH = Graph.of(
    [
        Call("gen", "first", "generate", ("prompts",), ("responses",)),
        Call("inf", "second", "inference", ("prompts", "responses"), ("scores",)),
        Call("train", "first", "train_step", ("responses", "scores")),
    ],
    ["prompts"],
)


class Replica(Role):
    """Role whose responses are prompts twice over, and whose scores are sums; it keeps what it was given."""

    def __init__(self) -> None:
        self.given: dict[str, Sample] = {}

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        self.given["gen"] = sample
        lengths = tuple(tuple(2 * n for n in group) for group in sample.meta.lengths["prompts"])
        data = np.repeat(sample.data["prompts"], 2)
        return RoleOutcome(Sample(Meta(sample.ids, {"responses": lengths}), {"responses": data}))

    def inference(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        self.given["inf"] = sample
        ends = np.cumsum(sample.meta.tokens("responses"))[:-1]
        sums = np.array([part.sum() for part in np.split(sample.data["responses"], ends)])
        return RoleOutcome(Sample(Meta(sample.ids, {"scores": ((1,),) * len(sample.ids)}), {"scores": sums}))

    def train_step(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        self.given["train"] = sample
        return RoleOutcome()


def island(first: Mesh, second: Mesh) -> tuple[Master[int], dict[int, dict[str, Replica]]]:
    roles: dict[int, dict[str, Replica]] = defaultdict(dict)
    for name, mesh in (("first", first), ("second", second)):
        for worker in mesh.workers:
            roles[worker][name] = Replica()
    workers = {number: ModelWorker(number, own, {}) for number, own in roles.items()}
    return Master({"first": first, "second": second}, RequestQueue(Local(workers), 1.0), count()), roles


def batch(step: int, size: int = 12, longest: int = 5) -> Sample:
    rng = np.random.default_rng(step)
    rows = [[rng.integers(1, 99, rng.integers(1, longest + 1))] for _ in range(size)]
    return packed([f"{step}-{row}" for row in range(size)], {"prompts": rows})


@pytest.mark.parametrize(("first", "second"), list(product(MESHES, MESHES)))
def test_each_copy_is_given_its_part_and_all_its_workers_the_same(first: Mesh, second: Mesh) -> None:
    master, roles = island(first, second)
    for step in range(2):
        whole = batch(step)
        master.traverse(GRAPH, whole, {})

        for call, role, mesh in (("gen", "first", first), ("inf", "second", second), ("train", "first", first)):
            ids: list[str] = []
            for rank in range(mesh.data):
                same = [roles[worker][role].given[call] for worker in mesh.copy(rank)]
                for other in same[1:]:
                    assert other.meta == same[0].meta
                    assert all(np.array_equal(other.data[key], same[0].data[key]) for key in other.data)
                ids += same[0].ids
                expected = whole.take(same[0].ids)
                if call == "inf":
                    np.testing.assert_array_equal(same[0].data["responses"], np.repeat(expected.data["prompts"], 2))
                if call == "train":
                    sums = [2 * whole.take([name]).data["prompts"].sum() for name in same[0].ids]
                    assert same[0].data["scores"].tolist() == sums
            assert sorted(ids) == sorted(whole.ids)


def test_the_master_sees_little_of_a_large_batch() -> None:
    master, _ = island(Mesh((0, 1)), Mesh((2,)))

    replies = master.traverse(GRAPH, batch(0, size=256, longest=512), {})

    assert sum(len(pickle.dumps(each)) for each in replies.values()) < 64_000
    # Worker 2 gathers for inference; 0 and 1 for training, as parts are balanced anew, and they share the scores of 2.
    assert master.collectives == {"gathers": 3, "scatters": 1}
