"""Batches that are responded to ahead of their turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.rl.dataflow.graph import Call
from hypha_ray.rl.dataflow.master import StreamDataset
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker, Role, RoleOutcome
from hypha_ray.rl.dataflow.requests import Meta, Reply, Sample, WorkerLostError
from tests.support.packed import packed

CALL = Call("rollout", "rollout", "generate", ("prompts",), ("responses", "versions"))
BATCHES = [
    packed([f"{batch}-{row}" for row in range(5)], {"prompts": [[np.array([batch, row])] for row in range(5)]})
    for batch in range(6)
]


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
