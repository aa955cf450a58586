"""Samples on their way through a graph."""

from __future__ import annotations

import random

import pytest

from hypha_ray.rl.dataflow.graph import Call, Graph
from hypha_ray.rl.dataflow.master import Buffer
from hypha_ray.rl.dataflow.requests import Meta, Shard

GENERATE = Call("gen", "actor", "generate", ("prompts",), ("ids",))
REWARD = Call("rew", "reward", "inference", ("ids",), ("rewards",))
TRAIN = Call("train", "actor", "train_step", ("ids", "rewards"))
GRAPH = Graph.of([GENERATE, REWARD, TRAIN], ["prompts"])


def _meta(ids: list[str], *keys: str) -> Meta:
    return Meta(tuple(ids), {key: tuple((2,) for _ in ids) for key in keys})


def test_a_call_may_begin_once_its_keys_are_there_and_only_once() -> None:
    buffer = Buffer(GRAPH)
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
    buffer = Buffer(GRAPH)
    buffer.put(_meta(["a"], "prompts"), Shard(0, 1))

    with pytest.raises(ValueError, match="a was fetched twice"):
        buffer.put(_meta(["a"], "prompts"), Shard(0, 2))


@pytest.mark.parametrize("seed", range(20))
def test_each_call_has_each_sample_once_in_whatever_order_replies_come(seed: int) -> None:
    rng, buffer = random.Random(seed), Buffer(GRAPH)
    had: dict[str, list[str]] = {call.name: [] for call in GRAPH.calls}
    running: list[tuple[Call, tuple[str, ...]]] = []
    waiting = [f"p{i}" for i in range(rng.randint(1, 30))]
    left: list[str] = []
    fetched = list(waiting)
    while waiting or len(buffer):
        if waiting and rng.random() < 0.5:
            buffer.put(_meta([waiting.pop(0)], "prompts"), Shard(0, len(waiting)))
        for call in GRAPH.calls:
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
