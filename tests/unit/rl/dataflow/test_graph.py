"""Order of model function calls, division of batches, and the shards that move between layouts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.errors import ConfigError
from hypha_ray.rl.dataflow.graph import Call, Graph, Mesh, balanced, moves, windows
from hypha_ray.rl.dataflow.requests import Shard, gather
from tests.support.packed import packed

GENERATE = Call("actor_gen", "actor", "generate", ("prompts",), ("input_ids", "logprobs"))
REWARD = Call("rew_inf", "reward", "inference", ("input_ids",), ("rewards",))
TRAIN = Call("actor_train", "actor", "train_step", ("input_ids", "logprobs", "rewards"))
MESHES = [
    Mesh(tuple(range(first, first + dp * tp * pp)), tp, pp)
    for first, dp, tp, pp in (
        (0, 1, 1, 1),
        (0, 2, 1, 1),
        (0, 4, 1, 1),
        (2, 2, 2, 1),
        (1, 1, 2, 2),
        (3, 2, 1, 2),
        (0, 3, 1, 1),
    )
]


def test_calls_have_a_level_after_those_that_they_wait_for() -> None:
    graph = Graph.of([TRAIN, REWARD, GENERATE], ["prompts"])

    assert graph.levels == ((GENERATE,), (REWARD,), (TRAIN,))
    assert graph.text().splitlines()[1] == "1  rew_inf (reward.inference): input_ids -> rewards"


@pytest.mark.parametrize(
    ("calls", "code", "named"),
    [
        (
            [GENERATE, Call("a", "r", "inference", ("b",), ("a",)), Call("b", "r", "inference", ("a",), ("b",))],
            "RL010",
            "a",
        ),
        ([GENERATE, REWARD, Call("again", "reward", "inference", ("input_ids",), ("rewards",))], "RL011", "rewards"),
        ([Call("actor_gen", "actor", "generate", (), ("prompts",))], "RL011", "prompts"),
        ([GENERATE, GENERATE], "RL011", "actor_gen"),
        ([GENERATE, TRAIN], "RL012", "rewards"),
    ],
)
def test_wrong_graphs_are_refused_by_name(calls: list[Call], code: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{code}.*\b{named}\b"):
        Graph.of(calls, ["prompts"])


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=12), st.randoms())
def test_any_graph_without_circles_is_ordered(takes: list[set[int]], random) -> None:  # type: ignore[no-untyped-def]
    calls = [
        Call(f"call{i}", "model", "inference", tuple(f"key{k}" for k in sorted(keys) if k < i), (f"key{i}",))
        for i, keys in enumerate(takes)
    ]
    shuffled = list(calls)
    random.shuffle(shuffled)

    levels = Graph.of(shuffled, []).levels

    place = {call.name: number for number, level in enumerate(levels) for call in level}
    assert len(place) == len(calls)
    for call in calls:
        before = [place[f"call{key[3:]}"] for key in call.takes]
        assert place[call.name] == max(before, default=-1) + 1


@pytest.mark.parametrize(("source", "target"), list(product(MESHES, MESHES)))
def test_each_copy_gets_every_id_as_it_was_made(source: Mesh, target: Mesh) -> None:
    rng = np.random.default_rng(0)
    ids = [f"p{i}" for i in range(12)]
    whole = packed(ids, {"x": [[rng.integers(0, 99, rng.integers(1, 5))] for _ in ids]})
    made = {}
    for head, window in zip(source.heads, windows(len(ids), source.data), strict=True):
        made[Shard(head, 7)] = whole.take([ids[i] for i in window])
    where = {"x": {name: shard for shard, sample in made.items() for name in sample.ids}}
    parts = balanced(whole.meta.tokens("x"), target.data)
    wanted = {w: [ids[i] for i in part] for rank, part in enumerate(parts) for w in target.copy(rank)}

    plan = moves(where, wanted, ["x"])

    for worker, names in wanted.items():
        came = plan.shards[worker]
        assert len(set(came)) == len(came)
        assert all(shard.worker != worker for shard in came)
        here = [made[shard] for shard in came] + [sample for shard, sample in made.items() if shard.worker == worker]
        got, expected = gather(here).take(names), whole.take(names)
        assert got.meta == expected.meta
        np.testing.assert_array_equal(got.data["x"], expected.data["x"])


def test_transfers_are_counted_by_their_kind() -> None:
    where = {"x": {"a": Shard(0, 1), "b": Shard(0, 1), "c": Shard(1, 1)}}

    both, apart = moves(where, {2: "abc", 3: "abc"}, ["x"]), moves(where, {2: "a", 3: "b"}, ["x"])
    assert (both.gathers, both.scatters, both.broadcasts) == (2, 0, 2)
    assert (apart.gathers, apart.scatters, apart.broadcasts) == (0, 1, 0)
    assert moves(where, {0: "ab", 1: "c"}, ["x"]).shards == {0: (), 1: ()}
    again = moves(where, {2: "abc", 3: "abc"}, ["x"], {(2, Shard(0, 1)), (2, Shard(1, 1)), (3, Shard(0, 1))})
    assert again.shards == {2: (), 3: (Shard(1, 1),)}


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 8))
def test_parts_are_balanced_as_greedy_division_promises(tokens: list[int], parts: int) -> None:
    divided = balanced(tokens, parts)

    assert sorted(i for part in divided for i in part) == list(range(len(tokens)))
    totals = [sum(tokens[i] for i in part) for part in divided]
    assert max(totals) - min(totals) <= max(tokens, default=0)
    assert min(map(len, divided)) > 0 or len(tokens) < parts or not any(tokens)


@given(st.integers(0, 100), st.integers(1, 9))
def test_windows_are_without_overlap(samples: int, parts: int) -> None:
    ranges = windows(samples, parts)

    assert [i for window in ranges for i in window] == list(range(samples))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_copies_and_heads_of_a_mesh() -> None:
    mesh = Mesh(tuple(range(10, 18)), tensor=2, pipeline=2)

    assert mesh.data == 2
    assert mesh.copy(0) == (10, 11, 14, 15)
    assert mesh.copy(1) == (12, 13, 16, 17)
    assert mesh.heads == (14, 16)


def test_workers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="RL013"):
        Mesh((0, 1, 2), tensor=2)
