"""Steps of an island with a critic, against plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.model.lora import ActorCritic
from hypha_ray.rl.engines.native import draw, generate, training_sampling
from hypha_ray.rl.island import Island
from hypha_ray.server.optimizer_step import ModelOptimizerStep
from hypha_ray.types import Samples
from tests.support.rl import BATCH, END, job, place_rewards, tokenizer

ALPHABET, ANSWERS = "_.0123456789=?", ("21", "543", "7", "89")
SETTINGS = {"algorithm": "ppo", "reference": "initial", "kl": 0.3, "critic.learning_rate": 2e-2, "critic.discount": 0.9}


def islands(count: int, *flags: str, **rl: Any) -> list[Island]:
    """Equal islands whose critics tell states apart from the start."""
    made = [Island(job(*flags, **{**SETTINGS, **rl}), tokenizer()) for _ in range(count)]
    for island in made:
        torch.nn.init.normal_(island.model.critic.head.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return made


def _gae(rewards: torch.Tensor, values: torch.Tensor, discount: float, decay: float) -> torch.Tensor:
    """By the definition of the sum, equation 16 of arXiv 1506.02438."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    errors = rewards + discount * following - values
    count = len(errors)
    return torch.stack([sum((discount * decay) ** (t - s) * errors[t] for t in range(s, count)) for s in range(count)])  # type: ignore[arg-type]


def _plain_step(
    model: ActorCritic, reference: Any, optimizers: list[torch.optim.Optimizer], batch: Samples, settings: Job
) -> None:
    """One response after the other, without any padding."""
    rl, sampling = settings.rl, training_sampling(settings.rl)
    ids, mask = (torch.from_numpy(batch.arrays[name]) for name in ("input_ids", "attention_mask"))
    found = generate(model.actor, ids, mask, draw(settings.run.seed, batch.keys, sampling), sampling, {END})
    new, values, advantages, returns = [], [], [], []
    for row in range(16):
        kept, count = found.attention_mask[row].bool(), int(found.mask[row].sum())
        tokens = found.ids[row][kept]
        answer = tokens[-count:, None]
        logprobs, held = (
            one(input_ids=tokens[None]).logits[0, -count - 1 : -1].log_softmax(-1).gather(1, answer)[:, 0]
            for one in (model.actor, reference)
        )
        states = model.critic.base_model(input_ids=tokens[None]).last_hidden_state[0, -count - 1 : -1]
        value = (states @ model.critic.head.weight.T + model.critic.head.bias)[:, 0]
        rewards = -rl.kl * (logprobs - held).detach()
        text = "".join(ALPHABET[one] for one in answer[:, 0].tolist())
        rewards[-1] += place_rewards([text], [ANSWERS[row // 4]])[0]
        advantage = _gae(rewards, value.detach(), rl.critic.discount, rl.critic.gae_lambda)
        new.append(logprobs)
        values.append(value)
        advantages.append(advantage)
        returns.append(advantage + value.detach())
    flat = torch.cat(advantages)
    flat = (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()
    logprobs = torch.cat(new)
    losses = [-((logprobs - logprobs.detach()).exp() * flat).mean(), (torch.cat(values) - torch.cat(returns)).square()]
    steps = (model.actor, losses[0]), (model.critic, losses[1].mean() / 2)
    for (part, loss), optimizer in zip(steps, optimizers, strict=True):
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(part.parameters(), settings.inner_optimizer.clip_norm or float("inf"))
        optimizer.step()


@pytest.mark.slow
def test_steps_of_ppo_are_those_of_plain_torch() -> None:
    (ours, other), settings = islands(2), job(**SETTINGS)
    (untrained,) = islands(1)
    plain: ActorCritic = other.model
    betas = settings.inner_optimizer.betas
    rates = ((plain.actor, 1e-2), (plain.critic, 2e-2))
    optimizers = [torch.optim.AdamW(one.parameters(), rate, betas=betas, weight_decay=0) for one, rate in rates]
    for _ in range(2):
        _plain_step(plain, untrained.model.actor, optimizers, BATCH, settings)

    results = [ours.step(BATCH) for _ in range(2)]

    assert results[1].sums["kl"][0] > 0.1
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(dict(ours.model.named_parameters())[name], tensor, atol=1e-3, rtol=1e-3)


def test_micro_batches_change_no_gradient_of_actor_or_critic() -> None:
    gradients = []
    for accumulation in (1, 4):
        (island,) = islands(1, f"--rounds.accumulation={accumulation}")
        island.backward(BATCH)
        gradients.append({name: one.grad for name, one in island.model.named_parameters()})

    assert any("critic" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


def test_the_server_steps_actor_and_critic_at_their_own_rates_as_a_worker_does() -> None:
    local, sender = islands(2)
    layout = layout_of(sender.model)
    theta = gather(sender.model, layout, 0)
    sender.backward(BATCH)
    gradient = gather(sender.model, layout, 0, gradients=True)

    ModelOptimizerStep(job(**SETTINGS), layout).step(0, theta, {}, gradient)

    local.step(BATCH)
    expected = gather(local.model, layout, 0)
    for group, array in gradient.items():
        np.testing.assert_allclose(array, expected[group], atol=1e-6)


def test_an_adapted_coefficient_goes_on_where_the_predecessor_was() -> None:
    one, successor = islands(2, kl_target=1e-6, kl_horizon=160)
    for _ in range(3):
        one.step(BATCH)

    successor.restore(one.state())

    # No divergence at first, then far more than the target: 0.3 · 0.98 · 1.02 · 1.02.
    expected = 0.3 * 0.98 * 1.02 * 1.02
    assert successor.step(BATCH).sums["kl_coefficient"] == (pytest.approx(expected), 1)


def test_an_averaged_reference_follows_the_policy_and_its_successor_goes_on() -> None:
    one, successor = islands(2, reference="average", reference_rate=0.25)
    (first,) = islands(1)
    average = {name: tensor.detach().clone() for name, tensor in first.model.actor.named_parameters()}
    for _ in range(2):
        one.step(BATCH)
        for name, tensor in one.model.actor.named_parameters():
            average[name] = 0.75 * average[name] + 0.25 * tensor.detach()

    state = one.state()

    assert set(state) >= {f"reference/{name}" for name in average}
    for name, tensor in average.items():
        np.testing.assert_allclose(state[f"reference/{name}"], tensor, atol=1e-6)
    successor.restore(state)
    assert all(np.array_equal(array, state[name]) for name, array in successor.state().items())


def test_parameters_are_those_of_actor_and_critic() -> None:
    (island,) = islands(1)
    body = sum(one.numel() for name, one in island.model.actor.named_parameters() if "lm_head" not in name)

    assert island.parameters == sum(one.numel() for one in island.model.actor.parameters()) + body + 32 + 1
