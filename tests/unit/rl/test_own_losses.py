"""Losses and advantages that a user brings: their contract, and refusals before a start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.config.load import load
from hypha_ray.config.rl import RL
from hypha_ray.driver.preflight.checks import check_plugins
from hypha_ray.errors import ConfigError
from hypha_ray.plugins import attempt
from hypha_ray.rl.algorithms.advantages import check_advantages
from hypha_ray.rl.dataflow.requests import Meta, Sample
from hypha_ray.rl.engines.native import Responses
from hypha_ray.rl.policy import PolicyObjective, Rollout, Scores
from hypha_ray.rl.reward_role import Advantage

MODULE = """
import torch
from hypha_ray.plugins import Options
from hypha_ray.rl.algorithms.policy_losses import LossInputs, TokenLosses
from hypha_ray.rl.algorithms.policy_losses import loss as clipped


def same(inputs):
    return clipped(inputs)


class Capped:
    class Options(Options):
        highest: float = 2.0

    def __init__(self, options):
        self._highest = options.highest

    def __call__(self, inputs):
        ratio = (inputs.logprobs - inputs.old_logprobs).exp().detach()
        losses = -ratio.clamp(max=self._highest) * inputs.advantages * inputs.logprobs
        if inputs.correction is not None:
            losses = losses * inputs.correction
        return TokenLosses(losses, {"capped": (ratio > self._highest).float()})


def raises(inputs):
    raise KeyError("lost")


def mean(inputs):
    return TokenLosses((inputs.logprobs * inputs.mask).mean())


def number(inputs):
    return 1.0


def constant(inputs):
    return TokenLosses(inputs.mask)


def infinite(inputs):
    return TokenLosses((inputs.logprobs - inputs.logprobs.detach()).abs().sqrt())


def renames(inputs):
    return TokenLosses(inputs.logprobs * 1, {"kl": inputs.mask})


def changing(inputs):
    inputs.advantages.mul_(2)
    return TokenLosses(-inputs.advantages * inputs.logprobs)


def centred(inputs):
    return TokenLosses(-inputs.logprobs * (inputs.advantages - inputs.advantages.mean()))


def over_tokens(inputs):
    return TokenLosses(-inputs.logprobs * inputs.advantages / inputs.mask.sum())


class Naming:
    class Options(Options):
        figure: str | int

    def __init__(self, options):
        self._figure = options.figure

    def __call__(self, inputs):
        return TokenLosses(-inputs.advantages * inputs.logprobs, {self._figure: inputs.mask})


def imaginary(rewards, lengths):
    return rewards.nan_to_num() * 1j


def best(rewards, lengths):
    present = ~rewards.isnan()
    return rewards.nan_to_num() - rewards.masked_fill(~present, -torch.inf).amax(1, keepdim=True)


def counting(rewards, lengths):
    return rewards.nan_to_num() - rewards.nan_to_num().mean(1, keepdim=True)


def of_batch(rewards, lengths):
    return (rewards - rewards.nanmean()).nan_to_num()


def flat(rewards, lengths):
    return rewards.flatten()


def absent(rewards, lengths):
    return rewards / 0
"""
MASK = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
NEW, OLD = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]]), torch.tensor([[-2.0, -2.5], [-0.5, -9.0]])
ADVANTAGES = torch.tensor([[1.0], [-2.0]])


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_losses.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))


def computed(**settings: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, tuple[float, float]]]:
    """Loss of two responses, its gradient by log-probabilities, and figures."""
    rl = RL.model_validate({"algorithm": "grpo", "aggregation": "token", **settings})
    new = NEW.clone().requires_grad_()
    responses = Responses(MASK.long(), MASK.long(), MASK, OLD, MASK[:, 0] > 0)
    objective = PolicyObjective(rl)
    rollout = Rollout(responses, MASK, ADVANTAGES, OLD, None, torch.ones(len(MASK)))
    weights, total = objective.weights(rollout)
    loss, sums = objective.loss(rollout, weights, Scores(new, torch.zeros_like(MASK)))
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach() / total, gradient / total, sums


def test_clipped_loss_by_another_name_is_the_same_to_the_bit() -> None:
    (ours, slope, figures), (theirs, other, same) = computed(), computed(loss="own_losses:same")
    assert ours.equal(theirs) and slope.equal(other) and figures == same
    assert figures["clip_share"] == (2, 3)


@pytest.mark.parametrize("highest", [2.0, 1.5])
def test_own_loss_is_that_of_its_formula_with_its_options(highest: float) -> None:
    loss, gradient, figures = computed(loss="own_losses:Capped", loss_options={"highest": highest})
    first, second = highest, min(highest, math.exp(0.5))
    assert float(loss) == pytest.approx((first * 1.0 + second * 2.0 - 2.0 * 0.5) / 3)
    assert gradient.tolist() == [pytest.approx([-first / 3, -second / 3]), pytest.approx([2 / 3, 0.0])]
    assert figures["capped"] == (1 if highest == 2.0 else 2, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"RL030.*own_losses:raises.*KeyError: 'lost'"),
        ("mean", r"RL030.*losses: \[\].*a value for each token"),
        ("number", "RL030.*got float, allowed TokenLosses"),
        ("constant", "RL030.*without a gradient"),
        ("infinite", "RL030.*a gradient that isn't finite"),
        ("renames", "RL030.*a figure 'kl'"),
        ("changing", "RL030.*a change in place of advantages"),
        ("centred", "RL030.*losses of a response that depend on others of its batch"),
        ("over_tokens", "RL030.*losses of a response that depend on others of its batch"),
    ],
)
def test_loss_that_breaks_the_contract_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt("rl.loss", "rl_losses", f"own_losses:{name}", None, None)


@pytest.mark.parametrize(
    "figure",
    [
        "reward",
        "loss",
        "kind",
        "round",
        "batches",
        "tokens",
        "entropy",
        "gradient_norm",
        "reward/exact",
        "metric/f1",
        7,
    ],
)
def test_figure_of_a_loss_is_none_that_records_have(figure: str | int) -> None:
    with pytest.raises(ConfigError, match=rf"RL030.*got a figure {figure!r}, allowed a name that no figure"):
        attempt("rl.loss", "rl_losses", "own_losses:Naming", {"figure": figure}, None)


@pytest.mark.parametrize("figure", ["capped_share", "clip_share", "ratio/largest"])
def test_figure_of_a_loss_may_have_another_name(figure: str) -> None:
    attempt("rl.loss", "rl_losses", "own_losses:Naming", {"figure": figure}, None)


@pytest.mark.parametrize("name", ["same", "Capped"])
def test_loss_that_keeps_the_contract_is_accepted(name: str) -> None:
    attempt("rl.loss", "rl_losses", f"own_losses:{name}", None, None)


@pytest.mark.parametrize(
    ("name", "apart", "message"),
    [
        ("counting", False, "RL031.*others beside an absent reward"),
        ("flat", False, r"RL031.*got \[4\]|RL031.*got \[3\]"),
        ("absent", False, "RL031.*isn't finite"),
        ("imaginary", False, "RL031.*got complex64"),
        ("of_batch", True, "RL031.*others beside another group"),
    ],
)
def test_advantages_that_break_the_contract_are_refused(name: str, apart: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_advantages(f"own_losses:{name}", None, apart)


@pytest.mark.parametrize(("name", "apart"), [("own_losses:best", True), ("own_losses:of_batch", False)])
def test_advantages_that_keep_the_contract_are_accepted(name: str, apart: bool) -> None:
    check_advantages(name, None, apart)


@pytest.mark.parametrize("name", ["group_std", "group_mean", "leave_one_out"])
def test_advantages_of_the_package_keep_the_contract(name: str) -> None:
    check_advantages(name, None, must_be_separate=True)


def test_normalising_over_a_batch_is_no_advantage_of_a_group() -> None:
    check_advantages("batch_std", None, must_be_separate=False)
    with pytest.raises(ConfigError, match=r"RL031.*others beside another group"):
        check_advantages("batch_std", None, must_be_separate=True)


def test_responses_have_the_advantages_of_an_own_function() -> None:
    columns = {
        "responses": np.ones(4, np.int64),
        "rewards": np.array([1.0, 0.0, 3.0, np.nan]),
        "ended": np.ones(4, bool),
    }
    sample = Sample(Meta(("0", "1"), dict.fromkeys(columns, ((1, 1), (1, 1)))), columns)
    rl = RL.model_validate({"algorithm": "grpo", "advantage": "own_losses:best"})
    made = Advantage(rl).inference(sample, {}).sample
    assert made is not None
    assert made.data["advantages"].tolist() == [0.0, -1.0, 0.0, 0.0]


def job_of(*flags: str) -> Job:
    return load(["--rl.algorithm", "grpo", *flags]).job


def test_advantages_of_a_whole_batch_are_refused_in_synchronous_steps() -> None:
    job = job_of("--rl.advantage", "own_losses:of_batch")
    check_plugins(job)
    with pytest.raises(ConfigError, match=r"RL031.*others beside another group"):
        check_plugins(job_of("--rl.advantage", "own_losses:of_batch", "--sync.strategy", "sync"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rl.loss", "own_losses:raises"], r"RL030.*KeyError"),
        (["--rl.loss", "clippd"], r"rl\.loss.*clipped"),
        (["--rl.loss", "own_losses:Capped", "--rl.loss_options.high", "2"], r"CFG001.*rl\.loss_options.*`highest`"),
        (["--rl.loss_options.high", "2"], r"CFG001.*rl\.loss_options: the job names no policy loss"),
        (["--rl.loss", "clipped", "--rl.loss_options.high", "2"], r"CFG001.*policy loss clipped has no options"),
    ],
)
def test_job_with_a_wrong_loss_is_refused_before_the_start(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plugins(job_of(*flags))
