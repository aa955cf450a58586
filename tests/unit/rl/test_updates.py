"""Optimizer steps on a batch of responses: minibatches, and losses that aren't finite."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from hypha_ray.optim.optimizers import Inner, build_optimizer
from hypha_ray.rl.dataflow.model_worker import RoleOutcome
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.learner import train
from hypha_ray.rl.policy import Rollout
from hypha_ray.types import Sums
from tests.support.rl import job

GROUP, ROWS = 2, 16


def rollout() -> Rollout:
    """Responses of one token each, whose advantages are their numbers."""
    ones = torch.ones(ROWS, 1)
    responses = Responses(ones.long(), ones.long(), ones, torch.zeros(ROWS, 1), torch.ones(ROWS, dtype=torch.bool))
    return Rollout(responses, ones, torch.arange(float(ROWS))[:, None], None, None, ones[:, 0])


class Trained:
    """One weight, whose gradient is the mean of advantages, and the responses of each minibatch."""

    def __init__(self, bad: float = -1.0) -> None:
        self.model, self.minibatches, self._bad = torch.nn.Linear(1, 1, bias=False), list[list[int]](), bad

    def train(self, **arguments: Any) -> RoleOutcome:
        settings = job(group_size=GROUP, minibatches=4, epochs=2)
        optimizer: Inner = build_optimizer(self.model, settings.inner_optimizer)
        return train(settings, rollout(), optimizer, lambda part: (part.mask, len(part)), self.loss, arguments)

    def loss(self, part: Rollout, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """The loss, which isn't finite if the bad response is there."""
        self.minibatches.append(part.advantages[:, 0].int().tolist())
        factors = part.advantages.clone()
        factors[factors == self._bad] = torch.nan
        return (factors * self.model.weight * weights).sum(), {}


def test_minibatches_are_groups_in_a_new_order_in_each_epoch() -> None:
    torch.manual_seed(0)
    trained = Trained()
    trained.train()
    epochs = [list(chain(*trained.minibatches[start : start + 4])) for start in (0, 4)]
    assert [len(one) for one in trained.minibatches] == [4] * 8
    for epoch in epochs:
        assert sorted(epoch) == list(range(ROWS))
        assert [row - 1 for row in epoch[1::2]] == epoch[::2], "a group stays together"
    assert epochs[0] != epochs[1] and sorted(epochs[0]) not in epochs


def test_minibatch_without_a_finite_gradient_damages_no_batch() -> None:
    trained = Trained(bad=5.0)
    outcome = trained.train()
    assert not outcome.facts["damaged"]
    assert outcome.facts["scored"] == 2 * (ROWS - 4)
    assert bool(trained.model.weight.isfinite().all())


def test_batch_without_any_finite_gradient_is_damaged() -> None:
    trained = Trained(bad=5.0)
    with torch.no_grad():
        trained.model.weight.fill_(torch.nan)
    assert trained.train().facts["damaged"]


@pytest.mark.parametrize("before", [None, 3.0])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_gradient_that_is_not_finite_leaves_those_that_were_there(kind: str, before: float | None) -> None:
    trained = Trained(bad=5.0)
    trained.model.weight.grad = None if before is None else torch.full((1, 1), before)
    assert trained.train(gradient=kind).facts["damaged"]
    gradient = trained.model.weight.grad
    assert (None if gradient is None else gradient.item()) == before
