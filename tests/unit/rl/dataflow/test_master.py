"""Batches and samples on their way through a graph, over many layouts, and ahead of their turn."""

from __future__ import annotations

import pickle
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count, product
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.rl.dataflow.graph import Call, Graph, Mesh
from hypha_ray.rl.dataflow.master import Buffer, Master, StreamDataset
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker, Role, RoleOutcome
from hypha_ray.rl.dataflow.requests import Meta, Reply, RequestQueue, Sample, Shard, WorkerLostError
from tests.support.packed import packed

GENERATE = Call("gen", "actor", "generate", ("prompts",), ("ids",))
REWARD = Call("rew", "reward", "inference", ("ids",), ("rewards",))
TRAIN = Call("train", "actor", "train_step", ("ids", "rewards"))
WITH_REWARDS = Graph.of([GENERATE, REWARD, TRAIN], ["prompts"])
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
CALL = Call("rollout", "rollout", "generate", ("prompts",), ("responses", "versions"))
BATCHES = [
    packed([f"{batch}-{row}" for row in range(5)], {"prompts": [[np.array([batch, row])] for row in range(5)]})
    for batch in range(6)
]


def _meta(ids: list[str], *keys: str) -> Meta:
    return Meta(tuple(ids), {key: tuple((2,) for _ in ids) for key in keys})


def test_a_call_may_begin_once_its_keys_are_there_and_only_once() -> None:
    buffer = Buffer(WITH_REWARDS)
    buffer.put(_meta(["a", "b"], "prompts"), Shard(0, 1))
    assert buffer.ready(GENERATE) == ("a", "b")
    assert buffer.ready(REWARD) == ()

    buffer.begin(GENERATE, ["a", "b"])
    buffer.amend(_meta(["b"], "ids"), Shard(1, 2))

    assert buffer.ready(GENERATE) == ()
    assert buffer.ready(REWARD) == ("b",)
    assert {key: places["b"] for key, places in buffer.locations.items()} == {
        "prompts": Shard(0, 1),
        "ids": Shard(1, 2),
    }
    assert buffer.tokens(["b"], "ids") == [2]


def test_an_id_that_is_fetched_twice_is_refused() -> None:
    buffer = Buffer(WITH_REWARDS)
    buffer.put(_meta(["a"], "prompts"), Shard(0, 1))

    with pytest.raises(ValueError, match="a was fetched twice"):
        buffer.put(_meta(["a"], "prompts"), Shard(0, 2))


@pytest.mark.parametrize("seed", range(20))
def test_each_call_has_each_sample_once_in_whatever_order_replies_come(seed: int) -> None:
    rng, buffer = random.Random(seed), Buffer(WITH_REWARDS)
    had: dict[str, list[str]] = {call.name: [] for call in WITH_REWARDS.calls}
    running: list[tuple[Call, tuple[str, ...]]] = []
    waiting = [f"p{i}" for i in range(rng.randint(1, 30))]
    left: list[str] = []
    fetched = list(waiting)
    while waiting or len(buffer):
        if waiting and rng.random() < 0.5:
            buffer.put(_meta([waiting.pop(0)], "prompts"), Shard(0, len(waiting)))
        for call in WITH_REWARDS.calls:
            if (ids := buffer.ready(call)[: rng.randint(1, 4)]) and rng.random() < 0.7:
                buffer.begin(call, ids)
                running.append((call, ids))
                had[call.name] += ids
        if running:
            call, ids = running.pop(rng.randrange(len(running)))
            if call.gives:
                buffer.amend(_meta(list(ids), *call.gives), Shard(1, rng.randrange(99)))
            left += buffer.end(call, ids)

    assert sorted(left) == sorted(fetched)
    assert all(sorted(names) == sorted(fetched) for names in had.values())
    assert had["gen"] == fetched


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


class Doubling(Role):
    """Role whose responses are prompts times two, with the version of the weights; it keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], int]] = []

    def generate(self, sample: Sample, arguments: Mapping[str, Any]) -> RoleOutcome:
        self.asked.append((sample.ids, arguments["version"]))
        lengths = sample.meta.lengths["prompts"]
        doubled = 2 * sample.data["prompts"]
        data = {"responses": doubled, "versions": np.full(len(doubled), arguments["version"])}
        return RoleOutcome(Sample(Meta(sample.ids, dict.fromkeys(data, lengths)), data))

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {}

    def take_weights(self, weights: Mapping[str, torch.Tensor], eta: float) -> None:
        pass


class Losing(Local):
    """Transport that loses the reply of one request, as the death of a worker does."""

    lost: int | None = None

    def receive(self, replies: Sequence[int], deadline_s: float) -> tuple[int, Reply]:
        number, reply = super().receive(replies, deadline_s)
        if reply.request == self.lost:
            self.lost = None
            raise WorkerLostError("RL016", "a model worker has died")
        return number, reply


def stream(workers: int = 2) -> tuple[StreamDataset[int], list[Doubling], Losing]:
    roles = [Doubling() for _ in range(workers)]
    beside = {n: ModelWorker(n, {"actor": role, "rollout": role}, {}) for n, role in enumerate(roles, start=1)}
    transport = Losing({0: ModelWorker(0, {}, {}), **beside})
    return StreamDataset(transport, tuple(beside), CALL, count(), 1.0), roles, transport


def asked(roles: Sequence[Doubling]) -> dict[str, list[int]]:
    """Versions of the weights that each prompt was responded to with."""
    found: dict[str, list[int]] = {}
    for role in roles:
        for ids, version in role.asked:
            for name in ids:
                found.setdefault(name, []).append(version)
    return found


def test_each_batch_goes_out_once_with_the_weights_of_as_many_steps_ago_as_it_is_ahead() -> None:
    dataset, roles, _ = stream()
    for step in range(6):
        replies = dataset.fetch(BATCHES[step : step + 3], step, 0)
        metas = [reply.meta for reply in replies]
        assert [name for meta in metas if meta for name in meta.ids] == list(BATCHES[step].ids)

    assert asked(roles) == {name: [max(0, int(name[0]) - 2)] for batch in BATCHES for name in batch.ids}
    assert {len(ids) for role in roles for ids, _ in role.asked} == {2, 3}


def test_batches_whose_turn_does_not_come_are_dropped_and_those_of_other_weights_too() -> None:
    dataset, roles, _ = stream()
    dataset.fetch(BATCHES[:3], 0, 0)
    dataset.fetch([BATCHES[2], BATCHES[3]], 1, 0)
    dataset.begin_anew()
    dataset.fetch([BATCHES[3], BATCHES[1]], 2, 0)

    found = asked(roles)
    assert {name[0]: found[name] for batch in BATCHES[:4] for name in batch.ids} == {
        "0": [0],
        "1": [0, 2],
        "2": [0],
        "3": [1, 2],
    }


def test_a_batch_whose_reply_was_lost_is_sent_again_as_it_was() -> None:
    dataset, roles, transport = stream(workers=1)
    dataset.fetch(BATCHES[:2], 0, 0)
    transport.lost = 3
    try:
        dataset.fetch(BATCHES[1:3], 1, 0)
    except WorkerLostError:
        dataset.send_again()
    replies = dataset.fetch(BATCHES[1:3], 1, 0)

    assert [reply.meta and reply.meta.ids for reply in replies] == [BATCHES[1].ids]
    assert asked(roles)["1-0"] == [0, 0]


def test_a_dropped_batch_whose_reply_was_lost_is_sent_again_and_holds_nothing_up() -> None:
    dataset, roles, transport = stream(workers=1)
    dataset.fetch(BATCHES[:2], 0, 0)
    dataset.begin_anew()
    transport.lost = 3
    with pytest.raises(WorkerLostError):
        dataset.fetch(BATCHES[2:4], 1, 0)
    dataset.send_again()
    replies = dataset.fetch(BATCHES[2:4], 1, 0)

    assert [reply.meta and reply.meta.ids for reply in replies] == [BATCHES[2].ids]
    assert asked(roles)["1-0"] == [0, 0]
