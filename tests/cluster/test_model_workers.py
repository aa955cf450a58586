"""Model workers in processes of their own: the same steps as in one process, in order, and whatever dies."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from hypha_ray.errors import AuthenticationError
from hypha_ray.failpoints import arm, hits
from hypha_ray.rl.dataflow.requests import ModelRequest, Reply, RequestQueue
from hypha_ray.rl.island import Island
from tests.support.rl import BATCH, EPISODES, classifier, job, tokenizer

pytestmark = pytest.mark.usefixtures("local_ray")
SGD = "--inner_optimizer.name=sgd"
"""Plain steps, in which rounding stays as small as it is."""
SETTINGS = {"algorithm": "ppo", "reference": "initial", "kl": 0.3, "evaluation.samples": 2}


@pytest.fixture
def disarmed() -> Iterator[None]:
    """No failpoints outlive the test in this process."""
    yield
    arm([], None)


def trained(steps: int, *flags: str, **settings: Any) -> tuple[Island, list[Any]]:
    """An island after so many steps, and their results."""
    island = Island(job(*flags, **{**SETTINGS, **settings}), tokenizer())
    return island, [island.step(BATCH) for _ in range(steps)]


def require_equal(one: Island, other: Island, tolerance: float) -> None:
    for name, tensor in one.model.named_parameters():
        torch.testing.assert_close(dict(other.model.named_parameters())[name], tensor, atol=tolerance, rtol=0)


@pytest.mark.parametrize("reference", ["initial", "round"])
def test_steps_with_workers_beside_are_those_of_one_process(reference: str) -> None:
    alone, expected = trained(3, SGD, reference=reference)
    beside, found = trained(3, SGD, reference=reference, model_workers=3)
    try:
        for one, other in zip(expected, found, strict=True):
            assert other.sums.keys() - one.sums.keys() == {"gathers"}
            for name, (total, weight) in one.sums.items():
                assert other.sums[name] == (pytest.approx(total, rel=1e-3, abs=1e-3), weight)
        require_equal(alone, beside, 1e-5)
        alone.merged(1)
        beside.merged(1)
        divergences = [island.step(BATCH).sums["kl"] for island in (alone, beside)]
        assert divergences[0] == pytest.approx(divergences[1], abs=1e-3)
        one, other = alone.evaluate([BATCH]), beside.evaluate([BATCH])
        assert other == {name: (pytest.approx(total, abs=1e-6), weight) for name, (total, weight) in one.items()}
    finally:
        beside.close()


def test_policy_gradients_of_three_workers_are_those_of_one_process() -> None:
    settings = {"algorithm": "grpo", "kl": 0.3, "reference": "round"}
    alone, expected = trained(4, SGD, *EPISODES, **settings)
    beside, found = trained(4, SGD, *EPISODES, model_workers=3, data_parallel="true", **settings)
    try:
        for one, other in zip(expected, found, strict=True):
            assert (one.scored, one.tokens) == (other.scored, other.tokens)
            assert float(other.norm) == pytest.approx(float(one.norm), rel=1e-3)
            for name, (total, weight) in one.sums.items():
                assert other.sums[name] == (pytest.approx(total, rel=1e-3, abs=1e-3), weight)
        require_equal(alone, beside, 1e-5)
    finally:
        beside.close()


@pytest.mark.parametrize("point", ["rl.generate", "rl.reward"])
def test_a_step_whose_model_worker_is_killed_is_the_same_step(point: str, tmp_path: Path, disarmed: None) -> None:
    log, folder = tmp_path / "hits.jsonl", tmp_path / "reward"
    classifier(folder)
    scored = ('--rl.reward.functions=["positions", "model"]', f"--rl.reward.model.repository={folder}")
    unharmed, expected = trained(4, *scored, model_workers=3)
    flags = (f'--testing.failpoints=["{point}=kill@3"]', f"--testing.failpoint_log={log}")
    harmed, found = trained(4, *scored, *flags, model_workers=3)
    try:
        assert hits(log, point) == 1
        assert all(one.sums["reward/model"][1] == 16 for one in expected)
        assert [one.sums for one in found] == [one.sums for one in expected]
        assert sum(len(one.revived) for one in found) == 1
        require_equal(unharmed, harmed, 0.0)
    finally:
        unharmed.close()
        harmed.close()


def test_a_model_worker_that_cannot_be_built_says_why_and_is_not_built_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judge = {"url": "http://127.0.0.1:9", "model": "m", "key_variable": "NO_SUCH_KEY"}
    flags = [f"--rl.reward.judge.{name}={value}" for name, value in judge.items()]
    island = Island(job('--rl.reward.functions=["judge"]', *flags, model_workers=3), tokenizer())
    try:
        with pytest.raises(AuthenticationError, match=r"RWD006.*NO_SUCH_KEY"):
            island.step(BATCH)
        assert "replaced" not in caplog.text
    finally:
        island.close()


def test_a_dead_and_a_stopped_model_worker_are_replaced_within_a_limit() -> None:
    island = Island(job("--worker.stall_s=9", **{**SETTINGS, "model_workers": 3}), tokenizer())
    try:
        island.step(BATCH)
        first, second = ray.get([actor.ping.remote() for actor in island._workers._actors.values()])
        os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)

        assert island._workers.revive() == (1, 2)
        assert {first, second}.isdisjoint(
            ray.get([actor.ping.remote() for actor in island._workers._actors.values()], timeout=120)
        )
    finally:
        island.close()


class Recorder:
    """Writes down the numbers of requests in the order in which it handles them, each with all workers of its group."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @ray.method(num_returns=2)
    def handle(self, request: ModelRequest) -> tuple[None, Reply]:
        self.seen.append(request.number)
        return None, Reply(request.worker, request.number)

    def all(self) -> list[int]:
        return self.seen


class Line:
    """Transport to actors that only record."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors

    def send(self, request: ModelRequest) -> Any:
        return self._actors[request.worker].handle.remote(request)[1]

    def receive(self, replies: Any, deadline_s: float) -> tuple[Any, Reply]:
        (ready, *_), _ = ray.wait(list(replies), timeout=deadline_s)
        return ready, ray.get(ready)


def test_actors_see_common_requests_of_200_multicasts_in_one_order() -> None:
    actors = [ray.remote(num_cpus=0)(Recorder).remote() for _ in range(3)]
    post, rng = RequestQueue(Line(actors), 60), random.Random(5)
    for number in range(200):
        post.request(
            *(ModelRequest(number, "train_step", worker) for worker in rng.sample(range(3), rng.randint(1, 3)))
        )
        if rng.random() < 0.4:
            post.flush()
            post.wait()
    post.flush()

    seen = ray.get([actor.all.remote() for actor in actors])

    assert sum(map(len, seen)) > 300
    for one, other in itertools.combinations(seen, 2):
        common = set(one) & set(other)
        assert [number for number in one if number in common] == [number for number in other if number in common]


class Reducer:
    """Adds the numbers of requests over all workers that a request goes to, by gloo."""

    def __init__(self, rank: int, meeting: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=3)
        self._groups = {members: dist.new_group(list(members)) for members in GROUPS}

    @ray.method(num_returns=2)
    def handle(self, request: ModelRequest) -> tuple[None, Reply]:
        total = torch.tensor([float(request.number)])
        dist.all_reduce(total, group=self._groups[request.arguments["members"]])
        return None, Reply(request.worker, request.number, facts={"total": float(total)})


GROUPS = [members for size in (1, 2, 3) for members in itertools.combinations(range(3), size)]
"""All groups of three workers."""


def test_200_interleaved_multicasts_with_a_collective_in_each_never_wait_for_each_other(tmp_path: Path) -> None:
    actors = [ray.remote(num_cpus=0)(Reducer).remote(rank, str(tmp_path / "meeting")) for rank in range(3)]
    post, rng = RequestQueue(Line(actors), 60), random.Random(7)
    sent = []
    for number in range(200):
        members = rng.choice(GROUPS)
        requests = [ModelRequest(number, "train_step", worker, arguments={"members": members}) for worker in members]
        rng.shuffle(requests)
        sent.append(post.request(*requests))
        if rng.random() < 0.3:
            post.flush()
    post.flush()
    while not all(pending.done for pending in sent):
        post.wait()

    for number, pending in enumerate(sent):
        assert [reply.facts["total"] for reply in pending.replies] == [number * len(pending.replies)] * len(
            pending.replies
        )
