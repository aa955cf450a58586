"""Steps of an island, against plain torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.rl.engines.native import draw, generate, training_sampling
from hypha_ray.rl.island import Island
from hypha_ray.types import Samples
from tests.support.rl import BATCH, END, job, place_rewards, prompts, tokenizer

EQUAL = prompts(["12=", "345="], ["x" * 30] * 2)
"""Prompts whose responses have no right place at all."""


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
