"""Steps of an island, with and without a critic, against plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from tests.support.rl import BATCH, END, job, place_rewards, prompts, tokenizer

EQUAL = prompts(["12=", "345="], ["x" * 30] * 2)
"""Prompts whose responses have no right place at all."""
ALPHABET, ANSWERS = "_.0123456789=?", ("21", "543", "7", "89")
SETTINGS = {"algorithm": "ppo", "reference": "initial", "kl": 0.3, "critic.learning_rate": 2e-2, "critic.discount": 0.9}


def weights(island: Island) -> dict[str, torch.Tensor]:
    """A copy of an island's weights."""
    return {name: tensor.detach().clone() for name, tensor in island.model.named_parameters()}


def test_a_step_of_grpo_is_that_of_plain_torch() -> None:
    ours, plain = Island(job(), tokenizer()), Island(job(), tokenizer()).model
    sampling = training_sampling(job().rl)
    ids, mask = (torch.from_numpy(BATCH.arrays[name]) for name in ("input_ids", "attention_mask"))
    responses = generate(plain, ids, mask, draw(job().run.seed, BATCH.keys, sampling), sampling, {END})
    texts, losses = [], []
    alphabet = "_.0123456789=?"
    for row in range(16):
        kept, count = responses.attention_mask[row].bool(), int(responses.mask[row].sum())
        tokens = responses.ids[row][kept]
        texts.append("".join(alphabet[one] for one in tokens[-count:].tolist()))
        logprobs = plain(input_ids=tokens[None]).logits[0, -count - 1 : -1].log_softmax(-1)
        losses.append(-logprobs.gather(1, tokens[-count:, None]).mean())
    rewards = place_rewards(texts, [one for one in ("21", "543", "7", "89") for _ in range(4)]).view(4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, betas=job().inner_optimizer.betas, weight_decay=0)
    (torch.stack(losses) * advantages.flatten()).mean().backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), job().inner_optimizer.clip_norm or float("inf"))
    optimizer.step()

    result = ours.step(BATCH)

    assert rewards.std(1).max() > 0
    assert result.sums["reward"] == (pytest.approx(float(rewards.sum())), 16)
    assert [one["prompt"] for one in result.shown] == ["12="] * 4
    assert [one["reward"] for one in result.shown] == pytest.approx(rewards[0].tolist())
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(dict(ours.model.named_parameters())[name], tensor, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_micro_batches_change_no_gradient(aggregation: str) -> None:
    gradients = []
    for accumulation in (1, 2, 4):
        island = Island(job(f"--rounds.accumulation={accumulation}", aggregation=aggregation), tokenizer())
        island.backward(BATCH)
        gradients.append({name: one.grad for name, one in island.model.named_parameters()})

    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "dapo", "gspo"])
def test_gradients_of_two_workers_add_up_to_that_of_the_joined_batch(algorithm: str) -> None:
    whole, first, second = (Island(job(algorithm=algorithm), tokenizer()) for _ in range(3))
    scored = [first.backward(_rows(0, 1), summed=True).scored, second.backward(_rows(1, 4), summed=True).scored]

    joined = whole.backward(BATCH)

    assert joined.scored == sum(scored) and min(scored) > 0
    parts = zip(first.model.parameters(), second.model.parameters(), strict=True)
    for parameter, (one, other) in zip(whole.model.parameters(), parts, strict=True):
        assert parameter.grad is not None and one.grad is not None and other.grad is not None
        torch.testing.assert_close((one.grad + other.grad) / sum(scored), parameter.grad, atol=1e-6, rtol=1e-4)


def _rows(start: int, stop: int) -> Samples:
    return Samples({name: array[start:stop] for name, array in BATCH.arrays.items()}, BATCH.keys[start:stop])


def test_responses_without_a_difference_in_reward_change_nothing() -> None:
    island = Island(job(), tokenizer())
    before = weights(island)

    result = island.step(EQUAL)

    assert result.sums["equal_groups"] == (2, 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(island).items())


def test_groups_of_equal_rewards_can_be_left_out() -> None:
    island = Island(job(drop_equal_groups="true"), tokenizer())

    result = island.step(EQUAL)

    assert result.scored == 0
    assert len(result.bad) == 0


@pytest.mark.parametrize(("reference", "divergence"), [("initial", True), ("round", False)])
def test_the_reference_is_the_first_policy_or_that_of_the_round(reference: str, divergence: bool) -> None:
    island = Island(job(reference=reference, kl=0.1), tokenizer())
    first = island.step(BATCH).sums["kl"][0]
    island.merged(1)

    second = island.step(BATCH).sums["kl"][0]

    assert first == pytest.approx(0, abs=1e-4)
    assert (second > 1e-3) == divergence


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits() -> None:
    islands = [Island(job(minibatches=2, epochs=2), tokenizer()) for _ in range(2)]
    for island in islands:
        for step in range(3):
            island.seed(7, step)
            island.step(BATCH)

    assert all(torch.equal(one, weights(islands[1])[name]) for name, one in weights(islands[0]).items())


def test_validation_responses_are_scored_and_count_right_ones() -> None:
    island = Island(job(**{"evaluation.samples": 3}), tokenizer())
    easy = Samples({name: np.repeat(array[:1], 50, 0) for name, array in BATCH.arrays.items()}, _keys(50))

    sums = island.evaluate([easy])

    reward, (right, count) = sums["reward"], sums["pass@1"]
    assert reward[1] == 150
    assert count == sums["pass@3"][1] == 50
    assert 0 <= right <= sums["pass@3"][0] <= 3 * right + 1e-9
    assert island.evaluate([easy]) == sums


def moved(island: Island) -> torch.Tensor:
    """The change of all weights in a step."""
    before = weights(island)
    island.step(BATCH)
    return torch.cat([(one - before[name]).flatten() for name, one in weights(island).items()])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_island_that_begins_with_trained_weights_lengthens_its_first_ten_steps(algorithm: str) -> None:
    first, late, successor = (Island(job(algorithm=algorithm), tokenizer()) for _ in range(3))
    first.merged(0)
    late.merged(4)
    successor.merged(4)
    successor.restore({})

    whole, part = moved(first), moved(late)

    assert late.optimizer.learning_rate == pytest.approx(2 / 10 * first.optimizer.learning_rate)
    torch.testing.assert_close(10 * part, whole, atol=1e-4, rtol=1e-2)
    assert torch.equal(moved(successor), whole)
    for _ in range(9):
        late.step(BATCH)
    assert late.optimizer.learning_rate == first.optimizer.learning_rate
    for island in (late, first):
        island.merged(5)
        island.step(BATCH)
    assert late.optimizer.learning_rate == first.optimizer.learning_rate == successor.optimizer.learning_rate


def _keys(count: int) -> Any:
    return np.stack([np.zeros(count), np.zeros(count), np.arange(count)], 1).astype(np.int64)


def test_a_step_tells_how_long_it_responded_and_how_long_it_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    island = Island(job(reference="initial", kl=0.1), tokenizer())
    lasting = {("actor", "generate"): 3.0, ("reward", "inference"): 0.25}
    lasting |= {("reference", "inference"): 0.5, ("advantage", "inference"): 0.125, ("actor", "train_step"): 2.0}
    for (role, name), seconds in lasting.items():
        monkeypatch.setattr(island._roles[role], name, slower(getattr(island._roles[role], name), clock, seconds))

    assert island.step(BATCH).times == {"generation_s": 3.25, "training_s": 2.625}


def slower(method: Callable[..., Any], clock: list[float], seconds: float) -> Callable[..., Any]:
    """A method that takes so much time by a clock of its own."""

    def call(*arguments: Any) -> Any:
        clock[0] += seconds
        return method(*arguments)

    return call


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
