"""Order of model function calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.errors import ConfigError
from hypha_ray.rl.dataflow.graph import Call, Graph

GENERATE = Call("actor_gen", "actor", "generate", ("prompts",), ("input_ids", "logprobs"))
REWARD = Call("rew_inf", "reward", "inference", ("input_ids",), ("rewards",))
TRAIN = Call("actor_train", "actor", "train_step", ("input_ids", "logprobs", "rewards"))


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
