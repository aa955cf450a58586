"""Advantages, losses and divergences equal those of verl, trl and torchrl, as tests/support/rl_oracles.py made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hypha_ray.config.rl import RL
from hypha_ray.families import ADVANTAGES
from hypha_ray.plugins import find
from hypha_ray.rl.algorithms.advantages import generalized_advantages, whitened
from hypha_ray.rl.algorithms.policy_losses import (
    AGGREGATIONS,
    ESTIMATORS,
    adapted,
    clipped,
    clipped_value_loss,
    decoupled_weight,
)
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.learner import trained_tokens
from hypha_ray.rl.policy import PolicyObjective, Rollout, Scores
from tests.support.rl_oracles import (
    ABSENT,
    BETA,
    CLIPS,
    DECAY,
    DISCOUNT,
    DIVERGENCES,
    HORIZON,
    LONGEST,
    TARGET,
    TRUNCATED,
    VALUE_CLIP,
)

ORACLES = json.loads((Path(__file__).parent / "oracles.json").read_text(encoding="utf-8"))
GIVEN = {name: torch.tensor(value, dtype=torch.float64) for name, value in ORACLES["inputs"].items()}
MASK = GIVEN["mask"]
TRL: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "bnpo": ("grpo", {"aggregation": "token"}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {"clip_high": 0.2}),
}
"""Algorithm and settings for each of trl's names of a loss."""


def loss(**settings: Any) -> float:
    """Mean loss of the frozen responses under these settings, with verl's advantages of GRPO."""
    rl = RL.model_validate({"generation": {"max_response_tokens": LONGEST}, **settings})
    advantages = torch.tensor(ORACLES["advantages"]["group_std"], dtype=torch.float64)[:, None]
    reference = GIVEN["reference"] if rl.reference != "none" else None
    ended = torch.ones(len(MASK), dtype=torch.bool)
    ended[list(TRUNCATED)] = False
    responses = Responses(MASK.long(), MASK.long(), MASK, GIVEN["old"], ended)
    every = torch.ones(len(MASK), dtype=torch.bool)
    mask, counted = trained_tokens(rl, responses, every)
    rollout = Rollout(responses, mask, advantages, GIVEN["old"], reference, counted)
    objective = PolicyObjective(rl)
    weights, total = objective.weights(rollout)
    summed, _ = objective.loss(rollout, weights, Scores(GIVEN["new"], torch.zeros_like(MASK)))
    return float(summed) / total


@pytest.mark.parametrize("name", sorted(ADVANTAGES.members.keys() - {"gae", "batch_scale"}))
def test_advantages_equal_those_of_verl(name: str) -> None:
    lengths = MASK.sum(1).view_as(GIVEN["rewards"])
    found = find("advantages", name)(GIVEN["rewards"], lengths)
    assert found.flatten().tolist() == pytest.approx(ORACLES["advantages"][name], abs=1e-6)


@pytest.mark.parametrize("case", sorted(key for key in ORACLES["verl"] if "/" in key))
def test_clipped_loss_equals_that_of_verl(case: str) -> None:
    clip, aggregation = case.split("/")
    low, high, dual = CLIPS[clip]
    settings = {"clip_low": low, "clip_high": high, "dual_clip": dual, "aggregation": aggregation}
    assert loss(algorithm="grpo", **settings) == pytest.approx(ORACLES["verl"][case], abs=1e-6)


def test_gspo_loss_equals_that_of_verl() -> None:
    found = loss(algorithm="gspo", clip_low=0.2, clip_high=0.2)
    assert found == pytest.approx(ORACLES["verl"]["gspo"], abs=1e-6)


@pytest.mark.parametrize("case", sorted(ORACLES["trl"]))
def test_loss_with_a_reference_equals_that_of_trl(case: str) -> None:
    kind, ratio, *delta = case.split("/")
    algorithm, own = TRL[kind]
    dual_clip = float(delta[0]) if delta else None
    found = loss(algorithm=algorithm, reference="initial", kl=BETA, ratio=ratio, dual_clip=dual_clip, **own)
    assert found == pytest.approx(ORACLES["trl"][case], abs=1e-6)


@pytest.mark.parametrize("case", sorted(ORACLES["trl_truncated"]))
def test_loss_without_responses_that_were_cut_off_equals_that_of_trl(case: str) -> None:
    kind, ratio, *delta = case.split("/")
    algorithm, own = TRL[kind]
    settings: dict[str, Any] = {"algorithm": algorithm, "mask_truncated": True, "ratio": ratio, **own}
    dual_clip = float(delta[0]) if delta else None
    found = loss(reference="initial", kl=BETA, dual_clip=dual_clip, **settings)
    assert found == pytest.approx(ORACLES["trl_truncated"][case], abs=1e-6)


def test_advantages_scaled_by_the_batch_equal_those_of_trl() -> None:
    rewards = GIVEN["rewards"].clone()
    rewards[ABSENT] = torch.nan
    found = find("advantages", "batch_scale")(rewards, MASK.sum(1).view_as(rewards))
    assert found.flatten().tolist() == pytest.approx(ORACLES["trl_batch"], abs=1e-6)


@pytest.mark.parametrize("case", sorted(key for key in ORACLES["torchrl"] if "/" in key))
def test_clipped_loss_equals_that_of_torchrl(case: str) -> None:
    kind, clip, *aggregation = case.split("/")
    low, high, _ = CLIPS[clip]
    settings: dict[str, Any] = {"clip_low": low, "clip_high": high, "aggregation": (*aggregation, "token")[0]}
    if (kind, *aggregation) == ("grpo", "token"):
        settings |= {"reference": "initial", "kl": BETA}
    assert loss(algorithm="grpo", **settings) == pytest.approx(ORACLES["torchrl"][case], abs=1e-6)


def test_advantages_of_a_group_equal_those_of_torchrl() -> None:
    found = find("advantages", "group_std")(GIVEN["rewards"] * 1e6, MASK.sum(1).view_as(GIVEN["rewards"]))
    assert found.flatten().tolist() == pytest.approx(ORACLES["torchrl"]["group_std"], abs=1e-6)


def test_generalized_advantages_returns_and_value_loss_equal_those_of_torchrl() -> None:
    rewards, values = GIVEN["new"] * MASK, GIVEN["reference"] * MASK
    found = generalized_advantages(rewards, values, MASK, DISCOUNT, DECAY)
    for name, tensor in zip(("advantages", "returns"), found, strict=True):
        expected = torch.tensor(ORACLES["torchrl"][name], dtype=torch.float64)
        assert torch.allclose(tensor, expected, atol=1e-6, rtol=0)
    loss, _ = clipped_value_loss(GIVEN["new"], GIVEN["old"], found[1], VALUE_CLIP)
    assert 2 * float((loss * MASK).sum() / MASK.sum()) == pytest.approx(ORACLES["torchrl"]["value_loss"], abs=1e-6)


def test_generalized_advantages_and_returns_equal_those_of_verl() -> None:
    rewards, values = GIVEN["new"] * MASK, GIVEN["reference"] * MASK
    advantages, returns = generalized_advantages(rewards, values, MASK, DISCOUNT, DECAY)

    expected = {name: torch.tensor(ORACLES["critics"][name], dtype=torch.float64) for name in ("advantages", "returns")}
    assert torch.allclose(whitened(advantages, MASK), expected["advantages"], atol=1e-6)
    assert torch.allclose(returns, expected["returns"], atol=1e-6)


def test_value_loss_equals_that_of_verl() -> None:
    returns = torch.tensor(ORACLES["critics"]["returns"], dtype=torch.float64)
    loss, taken = clipped_value_loss(GIVEN["new"], GIVEN["old"], returns, VALUE_CLIP)

    assert float((loss * MASK).sum() / MASK.sum()) == pytest.approx(ORACLES["critics"]["value_loss"], abs=1e-6)
    assert float((taken * MASK).sum() / MASK.sum()) == pytest.approx(ORACLES["critics"]["value_clip_share"], abs=1e-6)


@pytest.mark.parametrize(
    ("divergence", "expected"), list(zip(DIVERGENCES, ORACLES["critics"]["coefficients"], strict=True))
)
def test_adapted_coefficient_equals_that_of_verl(divergence: float, expected: float) -> None:
    assert adapted(BETA, divergence, TARGET, len(MASK), HORIZON) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_divergence_equals_that_of_verl(name: str) -> None:
    found = ESTIMATORS[name](GIVEN["new"], GIVEN["reference"])  # type: ignore[index]
    assert torch.allclose(found, torch.tensor(ORACLES["divergences"][name], dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(("cap", "weights"), [(None, [0.5, 1.0, 3.0]), (2.0, [0.5, 1.0, 0.0]), (3.5, [0.5, 1.0, 3.0])])
def test_tokens_of_older_weights_are_weighed_by_their_ratio_and_left_out_beyond_the_cap(
    cap: float | None, weights: list[float]
) -> None:
    proximal, behaviour = torch.tensor([[0.2, 0.4, 0.6]]).log(), torch.tensor([[0.4, 0.4, 0.2]]).log()
    assert decoupled_weight(proximal, behaviour, cap).tolist() == [pytest.approx(weights)]


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "dr_grpo"])
@pytest.mark.parametrize("cap", [1.05, 50.0])
def test_ratios_of_a_batchs_only_step_are_to_its_own_probabilities(algorithm: str, cap: float) -> None:
    rl = RL.model_validate({"algorithm": algorithm, "behaviour_cap": cap})
    new, behaviour = GIVEN["new"].clone().requires_grad_(), GIVEN["old"]
    advantages, generator = GIVEN["rewards"].reshape(-1, 1), torch.Generator().manual_seed(0)
    weights = torch.rand(MASK.shape, generator=generator, dtype=torch.float64) * MASK
    responses = Responses(MASK.long(), MASK.long(), MASK, behaviour, MASK[:, 0] > 0)
    rollout = Rollout(responses, MASK, advantages, None, None, torch.ones(len(MASK)))

    found, sums = PolicyObjective(rl).loss(rollout, weights, Scores(new, torch.zeros_like(MASK)))
    found.backward()

    truncated = (GIVEN["new"] - behaviour).exp().clamp(max=cap)
    assert (truncated[MASK > 0] == cap).any() == (cap < 2)
    expected = -advantages * truncated * weights
    assert found.item() == pytest.approx(float(expected.sum()), rel=1e-12)
    torch.testing.assert_close(new.grad, expected)
    assert sums["clip_share"][0] == 0
    gap, tokens = sums["logprob_gap"]
    assert gap == pytest.approx(float(((GIVEN["new"] - behaviour).abs() * MASK).sum()))
    assert tokens == float(MASK.sum())


def test_entropy_bonus_is_not_weighed_by_the_correction_for_what_sampled() -> None:
    rl = RL.model_validate({"algorithm": "grpo", "behaviour_cap": 50.0, "entropy": 0.5})
    entropy = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    responses = Responses(MASK.long(), MASK.long(), MASK, GIVEN["old"], MASK[:, 0] > 0)
    zeros = torch.zeros(len(MASK), 1, dtype=torch.float64)
    rollout = Rollout(responses, MASK, zeros, None, None, torch.ones(len(MASK)))
    found, _ = PolicyObjective(rl).loss(rollout, MASK, Scores(GIVEN["new"], entropy))
    assert float(found) == pytest.approx(-0.5 * float((entropy * MASK).sum()), rel=1e-12)


@pytest.mark.parametrize(("name", "total"), [("token", 3), ("sequence", 2), ("constant", 20)])
@pytest.mark.parametrize("masks", [False, True])
def test_responses_that_are_left_out_have_no_part_in_what_losses_are_divided_by(
    name: str, total: int, masks: bool
) -> None:
    tokens = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    ended = torch.tensor([True, False, True])
    responses = Responses(tokens.long(), tokens.long(), tokens, tokens, ended)
    rl = RL.model_validate({"algorithm": "grpo", "aggregation": name, "mask_truncated": masks})
    mask, counted = trained_tokens(rl, responses, is_kept=torch.tensor([True, False, True]))
    weights, found = AGGREGATIONS[name](mask, int(counted.sum()), 10)  # type: ignore[index]
    assert found == total
    assert weights[1].tolist() == [0.0, 0.0, 0.0]


def test_tokens_beyond_the_dual_clip_count_as_clipped() -> None:
    loss, taken = clipped(torch.tensor([10.0, 2.0, 0.5]), torch.tensor(-1.0), 0.2, 0.3, dual=3.0)
    assert loss.tolist() == [3.0, 2.0, pytest.approx(0.8)]
    assert taken.tolist() == [True, False, True]
