"""Packed samples, and the order of requests on their way."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.model.tokenizers import pack
from hypha_ray.rl.dataflow.actor import Actors
from hypha_ray.rl.dataflow.model_worker import ModelWorker, Role
from hypha_ray.rl.dataflow.requests import (
    Hook,
    Meta,
    ModelRequest,
    Name,
    Reallocate,
    Reply,
    RequestQueue,
    Sample,
    Transfer,
    gather,
)
from hypha_ray.rl.policy import sample_of
from tests.support.packed import packed
from tests.support.rl import BATCH, job, tokenizer

groups = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=6)


def _sample(lengths: list[list[int]], key: str = "ids", first: int = 0) -> Sample:
    numbers = iter(range(1 << 53, 1 << 54))  # more than a float32 holds
    rows = [[np.array([next(numbers) for _ in range(n)], dtype=np.int64) for n in group] for group in lengths]
    return packed([f"p{first + i}" for i in range(len(lengths))], {key: rows})


@given(groups, st.randoms())
def test_taken_apart_and_gathered_again_is_the_same(lengths: list[list[int]], random) -> None:  # type: ignore[no-untyped-def]
    sample = _sample(lengths)
    order = list(sample.ids)
    random.shuffle(order)
    cut = random.randint(0, len(order) - 1)
    parts = [sample.take(ids) for ids in (order[:cut], order[cut:]) if ids]

    joined = gather(parts).take(sample.ids)

    assert joined.meta == sample.meta
    np.testing.assert_array_equal(joined.data["ids"], sample.data["ids"])


def test_keys_are_added_by_id_whatever_the_order() -> None:
    sample, scores = _sample([[2], [3]]), packed(["p1", "p0"], {"score": [[np.array([1.0])], [np.array([0.0])]]})

    both = sample.update(scores)

    assert both.data["score"].tolist() == [0.0, 1.0]
    assert list(both.select(["score"]).data) == ["score"]


@pytest.mark.parametrize("lengths", [((1,),), ((1,), (2,), (3,))])
def test_lengths_for_other_ids_are_refused(lengths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="lengths for"):
        Meta(("a", "b"), {"ids": lengths})


def test_arrays_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows, its lengths add up to 2"):
        Sample(Meta(("a",), {"ids": ((2,),)}), {"ids": np.zeros(3)})


def test_an_id_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="differ"):
        gather([_sample([[1]]), _sample([[2]])])


class Log:
    """Workers that write down what they are sent, and answer in any order."""

    def __init__(self, seed: int) -> None:
        self.sent: dict[int, list[int]] = defaultdict(list)
        self._random = random.Random(seed)

    def send(self, request: ModelRequest) -> tuple[int, int]:
        self.sent[request.worker].append(request.number)
        return request.worker, request.number

    def receive(self, replies: Sequence[tuple[int, int]], deadline_s: float) -> tuple[tuple[int, int], Reply]:
        chosen = self._random.choice(replies)
        return chosen, Reply(*chosen)


@pytest.mark.parametrize("seed", range(50))
def test_any_two_workers_see_their_common_requests_in_one_order(seed: int) -> None:
    rng, log = random.Random(seed), Log(seed)
    queue, open_requests = RequestQueue(log, 60), 0
    for number in range(200):
        name: Name = rng.choice(["generate", "inference", "train_step"])
        queue.request(*(ModelRequest(number, name, worker) for worker in rng.sample(range(5), rng.randint(1, 5))))
        open_requests += 1
        if rng.random() < 0.4:
            queue.flush()
            for _ in range(rng.randint(0, open_requests)):
                assert queue.wait().done
                open_requests -= 1

    for one, other in combinations(log.sent.values(), 2):
        common = set(one) & set(other)
        assert [n for n in one if n in common] == [n for n in other if n in common]


def test_blocking_requests_wait_for_the_flush_small_groups_first() -> None:
    log = Log(0)
    queue = RequestQueue(log, 60)
    queue.request(ModelRequest(1, "train_step", 0), ModelRequest(1, "train_step", 1))
    queue.request(ModelRequest(2, "inference", 1))
    queue.request(ModelRequest(3, "spec", 0))

    assert log.sent == {0: [3]}
    queue.flush()

    assert log.sent == {0: [3, 1], 1: [2, 1]}


class Initialized(Role):
    """A role that counts."""

    def __init__(self) -> None:
        self.times = 0

    def initialize(self, steps: int) -> None:
        self.times += 1


def test_a_worker_answers_short_requests_while_ten_computations_are_queued() -> None:
    role = Initialized()
    worker = ModelWorker(0, {"actor": role}, {"steps": 640})
    queue = RequestQueue(Actors(worker, job(), pack(tokenizer())), 60)
    for number in range(10):
        queue.request(ModelRequest(number, "initialize", 0, "actor", arguments={"steps": 640}))
    queue.flush()
    prompts = sample_of(BATCH)
    queue.request(ModelRequest(10, "spec", 0))
    queue.request(ModelRequest(11, "fetch", 0, ids=prompts.ids, arguments={"sample": prompts}))

    (spec,), (fetched,) = queue.wait().replies, queue.wait().replies
    assert (spec.request, spec.facts, fetched.request, fetched.meta) == (10, {"steps": 640}, 11, prompts.meta)
    assert role.times == 0
    assert [queue.wait().replies[0].request for _ in range(10)] == list(range(10))
    assert role.times == 10


ALLOWED = {
    "before": {"generate": "TR", "inference": "TR", "train_step": "TR"},
    "after": {"generate": "R", "inference": "R", "train_step": "R"},
}
HOOKS: dict[str, Hook] = {
    "T": Transfer(()),
    "R": Reallocate("actor", "rollout"),
}
NAMES: list[Name] = [
    "fetch", "spec", "model_config", "clear_data_cache", "initialize", "generate", "inference", "train_step"
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_stand_only_where_they_have_a_meaning(name: Name, place: str, hook: str) -> None:
    hooks = {place: (HOOKS[hook],)}
    if hook in ALLOWED[place].get(name, ""):
        ModelRequest(1, name, 0, **hooks)  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=rf"{name}"):
        ModelRequest(1, name, 0, **hooks)  # type: ignore[arg-type]


def test_a_transfer_comes_first() -> None:
    with pytest.raises(ValueError, match="Transfer can't stand at place 1"):
        ModelRequest(1, "inference", 0, before=(HOOKS["R"], HOOKS["T"]))
