"""Gradients of a policy in parts, minibatches, and losses that aren't finite."""

from __future__ import annotations

from itertools import chain, count
from typing import Any

import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.model.lora import build_trained
from hypha_ray.optim.optimizers import Inner, build_optimizer
from hypha_ray.optim.torch_extras import LossScale
from hypha_ray.rl.batches import sums_of
from hypha_ray.rl.dataflow.graph import Mesh, step_graph
from hypha_ray.rl.dataflow.master import Extras, Master
from hypha_ray.rl.dataflow.model_worker import Local, ModelWorker, RoleOutcome
from hypha_ray.rl.dataflow.requests import RequestQueue
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.island import Island
from hypha_ray.rl.learner import train
from hypha_ray.rl.policy import Rollout, sample_of
from hypha_ray.rl.reward_role import Advantage
from hypha_ray.rl.roles import trained_roles
from hypha_ray.types import Sums
from tests.support.rl import BATCH, job, prompts, tokenizer

SGD = "--inner_optimizer.name=sgd"
GROUP, ROWS = 2, 16


class Parallel:
    """A policy whose gradient as many model workers compute, which have the same weights."""

    def __init__(self, job: Job, workers: int) -> None:
        self.model = build_trained(job).eval()
        self._graph = step_graph(job.rl)
        roles = {**trained_roles(job, self.model, tokenizer(), 0), "advantage": Advantage(job.rl)}
        first = ModelWorker(0, roles, {})
        beside = {number: ModelWorker(number, {"learner": roles["learner"]}, {}) for number in range(1, workers)}
        meshes = {name: Mesh((0,)) for name in roles} | {"learner": Mesh(tuple(range(workers)))}
        self._master = Master(meshes, RequestQueue(Local({0: first, **beside}), 0.0), count())
        self._master.ask("initialize", "actor", steps=3)

    def step(self, batch: Any = BATCH, **arguments: Any) -> Any:
        return self._master.traverse(
            self._graph, sample_of(batch), {"rew_inf": Extras({"round": 0}), "actor_train": Extras(arguments)}
        )


def require_equal(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 6])
@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "dapo", "gspo", "reinforce++"])
def test_steps_are_those_of_one_worker_however_many_share_in_them(algorithm: str, workers: int) -> None:
    more = {"reference": "initial", "kl": 0.1, "entropy": 0.01} if algorithm != "dapo" else {}
    alone = Island(job(SGD, algorithm=algorithm, **more), tokenizer())
    parallel = Parallel(job(SGD, algorithm=algorithm, data_parallel="true", **more), workers)
    start = build_trained(job())
    for _ in range(3):
        expected, replies = alone.step(BATCH), parallel.step()
        facts = replies["actor_train"][0].facts
        assert (facts["scored"], facts["tokens"]) == (expected.scored, expected.tokens)
        assert facts["loss"] == pytest.approx(float(expected.loss), abs=1e-6)
        assert facts["norm"] == pytest.approx(float(expected.norm), rel=1e-4)
        found = sums_of(replies)
        assert len(replies["actor_grad"]) == min(workers, 4)
        for name in found:
            assert found[name] == pytest.approx(expected.sums[name], rel=1e-3, abs=1e-5)
    require_equal(parallel.model, alone.model)
    pairs = zip(start.parameters(), alone.model.parameters(), strict=True)
    assert max(float((one - other).detach().abs().max()) for one, other in pairs) > 1e-4


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_a_gradient_is_added_to_those_that_are_there(kind: str) -> None:
    alone, parallel = Island(job(SGD), tokenizer()), Parallel(job(SGD, data_parallel="true"), 2)
    for _ in range(2):
        alone.backward(BATCH, summed=kind == "sum")
        parallel.step(gradient=kind)
    for one, other in zip(parallel.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    parallel = Parallel(job(SGD, data_parallel="true"), 2)
    with torch.no_grad():
        parallel.model.lm_head.weight[3] = torch.inf
    before = {name: one.detach().clone() for name, one in parallel.model.named_parameters()}
    facts = parallel.step()["actor_train"][0].facts

    assert facts["damaged"] and not facts["scored"]
    assert all(torch.equal(one, before[name]) for name, one in parallel.model.named_parameters())


def test_a_batch_of_which_nothing_is_kept_changes_nothing_and_is_not_bad() -> None:
    parallel = Parallel(job(SGD, data_parallel="true", algorithm="dapo"), 2)
    equal = prompts(["12=", "345="], ["x" * 30] * 2)  # No response has a right place.
    before = {name: one.detach().clone() for name, one in parallel.model.named_parameters()}
    facts = parallel.step(equal)["actor_train"][0].facts

    assert not facts["scored"] and not facts["damaged"]
    assert all(torch.equal(one, before[name]) for name, one in parallel.model.named_parameters())


@pytest.mark.parametrize("flag", ["epochs=2", "minibatches=2", "staleness=1", "algorithm=ppo"])
def test_what_needs_several_gradients_of_a_batch_is_refused(flag: str) -> None:
    flags = ["--rl.algorithm=grpo", "--rl.data_parallel=true", "--rl.model_workers=3", f"--rl.{flag}"]
    with pytest.raises(ConfigError, match=r"CFG011.*rl\.data_parallel"):
        load(["--dataset.path", "unused", *flags])


def rollout() -> Rollout:
    """Responses of one token each, whose advantages are their numbers."""
    ones = torch.ones(ROWS, 1)
    responses = Responses(ones.long(), ones.long(), ones, torch.zeros(ROWS, 1), torch.ones(ROWS, dtype=torch.bool))
    return Rollout(responses, ones, torch.arange(float(ROWS))[:, None], None, None, ones[:, 0])


class Trained:
    """One weight, whose gradient is the mean of advantages, and the responses of each minibatch."""

    def __init__(self, bad: float = -1.0) -> None:
        self.model, self.minibatches, self._bad = torch.nn.Linear(1, 1, bias=False), list[list[int]](), bad

    def train(self, scale: LossScale | None = None, **arguments: Any) -> RoleOutcome:
        settings = job(group_size=GROUP, minibatches=4, epochs=2)
        optimizer: Inner = build_optimizer(self.model, settings.inner_optimizer)
        return train(settings, rollout(), optimizer, lambda part: (part.mask, len(part)), self.loss, arguments, scale)

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


def high_scale() -> LossScale:
    """A scale of losses at which gradients of the one weight overflow."""
    scale = LossScale(torch.device("cpu"))
    scale.scale.fill_(2.0**127)
    return scale


@pytest.mark.parametrize("before", [None, 3.0])
@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_gradient_that_overflows_by_its_scale_is_computed_again(kind: str, before: float | None) -> None:
    trained, scale = Trained(), high_scale()
    trained.model.weight.grad = None if before is None else torch.full((1, 1), before)
    assert not trained.train(scale, gradient=kind).facts["damaged"]
    mean = sum(range(ROWS)) / ROWS  # 7.5, so at 2¹²⁶ it is above the largest number, 2¹²⁸.
    added = mean * (ROWS if kind == "sum" else 1)
    assert trained.model.weight.grad.item() == (before or 0.0) + added
    assert float(scale.scale) == 2.0**125 and trained.minibatches == [list(range(ROWS))] * 3


def test_scale_changes_no_step_and_halves_once_for_all() -> None:
    plain, scaled, scale = Trained(), Trained(), high_scale()
    scaled.model.load_state_dict(plain.model.state_dict())
    for trained, factor in ((plain, None), (scaled, scale)):
        torch.manual_seed(0)
        assert trained.train(factor).facts["scored"] == 2 * ROWS
    assert torch.equal(plain.model.weight, scaled.model.weight)
    assert float(scale.scale) < 2.0**126 and len(scaled.minibatches) > len(plain.minibatches)


def test_loss_that_is_not_finite_is_damage_and_no_overflow() -> None:
    trained, scale = Trained(bad=5.0), high_scale()
    trained.model.weight.grad = torch.full((1, 1), 3.0)
    assert trained.train(scale, gradient="mean").facts["damaged"]
    assert trained.model.weight.grad.item() == 3.0 and float(scale.scale) == 2.0**127


FP16 = "--worker.autocast=fp16"


def test_gradient_of_a_policy_in_float16_is_that_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    island = Island(job(SGD, FP16, aggregation="token"), tokenizer())
    ((_, scale),) = island._loss_scales()
    scale.scale.fill_(1024.0)
    seen: list[Rollout] = []
    learner = island._roles["actor"].learner
    rollout_of = learner.rollout
    monkeypatch.setattr(learner, "rollout", lambda sample: seen.append(rollout_of(sample)) or seen[-1])
    step = island.backward(BATCH)
    assert step.scored and float(scale.scale) == 1024
    found = {name: one.grad.clone() for name, one in island.model.named_parameters()}

    (batch,), model = seen, island.model
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    attention = batch.responses.attention_mask
    width = batch.mask.shape[1]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    with torch.autocast("cpu", torch.float16):
        logits = model(batch.responses.ids, attention_mask=attention, position_ids=positions, use_cache=False).logits
    logprobs = logits[:, -width - 1 : -1].float().log_softmax(-1)
    logprobs = logprobs.gather(2, batch.responses.ids[:, -width:, None])[..., 0]
    ratio = (logprobs - batch.responses.logprobs).exp()
    assert bool(((ratio - 1).abs() < 0.1)[batch.mask.bool()].all()), "nothing is clipped"
    loss = -(ratio * batch.advantages * batch.mask).sum() / batch.mask.sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert float(step.loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, one in model.named_parameters():
        torch.testing.assert_close(found[name], one.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-3


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_successor_goes_on_with_the_scales_of_losses(algorithm: str) -> None:
    first, second = (Island(job(SGD, FP16, algorithm=algorithm), tokenizer()) for _ in range(2))
    for _, scale in first._loss_scales():
        scale.scale.fill_(2.0**40)
    assert first.step(BATCH).scored
    scales = {name: float(scale.scale) for name, scale in first._loss_scales()}
    assert list(scales) == (["actor"] if algorithm == "grpo" else ["actor", "critic"])
    assert all(number < 2.0**40 for number in scales.values())

    second.restore(first.state())
    assert {name: float(scale.scale) for name, scale in second._loss_scales()} == scales
