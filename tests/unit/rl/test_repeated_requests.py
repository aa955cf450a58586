"""Requests that are made twice, as in a step that begins again: they are answered as if they were made once."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.model.lora import build_trained
from hypha_ray.rl.batches import sums_of
from hypha_ray.rl.dataflow.graph import Mesh, step_graph
from hypha_ray.rl.dataflow.master import Extras, Master
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker
from hypha_ray.rl.dataflow.requests import ModelRequest, RequestQueue
from hypha_ray.rl.policy import sample_of
from hypha_ray.rl.reward_role import Advantage
from hypha_ray.rl.roles import trained_roles
from hypha_ray.types import Sums
from tests.support.rl import BATCH, job, tokenizer


class Twice(Local):
    """Transport that makes each request twice, those that change weights aside."""

    def send(self, request: ModelRequest) -> int:
        if request.name not in ("train_step", "initialize"):
            super().send(request)
        return super().send(request)


def steps(settings: Job, transport: type[Local]) -> tuple[list[Sums], list[Any], float]:
    """Take three steps; return their figures, the weights after them, and the coefficient of the divergence."""
    model = build_trained(settings).eval()
    advantage = Advantage(settings.rl)
    roles = {**trained_roles(settings, model, tokenizer(), 0), "advantage": advantage}
    meshes = {name: Mesh((0,)) for name in roles}
    master = Master(meshes, RequestQueue(transport({0: ModelWorker(0, roles, {})}), 0.0), count())
    for name in ("actor", *(["critic"] if settings.rl.has_critic else [])):
        master.ask("initialize", name, steps=3)
    found = []
    for step in range(3):
        extras = {"rew_inf": Extras({"round": 0}), "advantage_inf": Extras({"step": step})}
        found.append(sums_of(master.traverse(step_graph(settings.rl), sample_of(BATCH), extras)))
    return found, [parameter.detach().clone() for parameter in model.parameters()], advantage.kl


@pytest.mark.parametrize(
    "settings",
    [
        {"kl_place": "reward", "kl": 0.1, "kl_target": 0.1, "kl_horizon": 100, "reference": "initial"},
        {"algorithm": "ppo", "kl": 0.1, "kl_target": 0.1, "kl_horizon": 100, "reference": "initial"},
        {"algorithm": "reinforce++", "data_parallel": "true", "kl": 0.1, "reference": "initial"},
        {"behaviour_cap": 2.0, "offload_reference": "true", "kl": 0.1, "reference": "initial"},
    ],
)
def test_requests_of_all_roles_made_twice_change_nothing(settings: dict[str, Any]) -> None:
    """Advantages, references, critics, learners, rewards and generation all answer the second time as the first."""
    wanted = job("--inner_optimizer.name=sgd", **settings)
    sums, weights, coefficient = steps(wanted, Local)
    again, others, same = steps(wanted, Twice)

    assert again == sums
    assert same == coefficient
    for one, other in zip(weights, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    if wanted.rl.kl_target is not None:
        assert coefficient != wanted.rl.kl
