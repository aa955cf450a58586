"""Losses of preferences: those of TRL on fixed batches, their figures, and what a loss of one's own may be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from hypha_ray.config.schema import Job
from hypha_ray.config.training import Preference
from hypha_ray.errors import ConfigError
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.metrics import evaluate, metrics_of
from hypha_ray.model.preferences.losses import reference_model, with_preferences
from hypha_ray.model.task import Task
from hypha_ray.model.tasks import find_task
from hypha_ray.plugins import attempt
from tests.support.trl_losses import CASES, CONFIG, FILE

CLOSE = 1e-6


def frozen(prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of the file whose names begin so."""
    with safe_open(FILE, "pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{prefix}/")]  # noqa: SIM118 - it isn't a mapping.
        return {name.removeprefix(f"{prefix}/"): file.get_tensor(name) for name in names}


def llama(prefix: str, dtype: torch.dtype = torch.float32) -> Any:
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.load_state_dict(frozen(prefix))
    return model.to(dtype)


def inputs_of(task: Task, *names: str) -> dict[str, torch.Tensor]:
    tensors = frozen("batch")
    return task.inputs({name: tensors[name] for name in ("input_ids", "attention_mask", "labels", *names)})


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[Task, dict[str, torch.Tensor], Any]:
    """Task, inputs and policy of one of TRL's cases."""
    loss = name.split(maxsplit=1)[0]
    settings = Preference.model_validate({"loss": loss, **CASES[name]})
    task = with_preferences(find_task("causal-lm"), settings, reference_model(llama("reference", dtype).eval()))
    return task, inputs_of(task, *(["desirable"] if loss == "kto" else [])), llama("policy", dtype)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_on_a_batch_equal_those_of_trl(name: str) -> None:
    task, inputs, policy = case(name, torch.float64)
    loss = compute_losses(task, policy, inputs).trained
    loss.backward()
    expected = frozen(name)
    assert loss.item() == pytest.approx(expected.pop("loss").item(), rel=CLOSE, abs=CLOSE)
    assert expected.keys() == {key for key, _ in policy.named_parameters()}
    for key, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=CLOSE, atol=CLOSE, msg=key)


def test_rewards_are_log_ratios_times_beta_and_accuracy_counts_larger_ones() -> None:
    task, inputs, policy = case("dpo")
    reference = llama("reference").eval()
    figures = metrics_of(task, evaluate(policy, task, [frozen_batch()], "cpu"))
    ratios = []
    for side in range(2):
        for sample in range(5):
            by_model = [answer_logprob(model, inputs, sample, side) for model in (policy, reference)]
            ratios.append(0.1 * (by_model[0] - by_model[1]))
    chosen, rejected = ratios[:5], ratios[5:]
    assert figures["reward_chosen"] == pytest.approx(sum(chosen) / 5, rel=1e-5)
    assert figures["reward_rejected"] == pytest.approx(sum(rejected) / 5, rel=1e-5)
    assert figures["margin"] == pytest.approx((sum(chosen) - sum(rejected)) / 5, rel=1e-5)
    wins = [first > second for first, second in zip(chosen, rejected, strict=True)]
    assert 0 < sum(wins) < 5
    assert figures["accuracy"] == pytest.approx(sum(wins) / 5)
    assert figures["samples"] == 5 and "perplexity" not in figures


def frozen_batch() -> dict[str, torch.Tensor]:
    tensors = frozen("batch")
    return {name: tensors[name] for name in ("input_ids", "attention_mask", "labels")}


def answer_logprob(model: Any, inputs: dict[str, torch.Tensor], sample: int, side: int) -> float:
    """Log-probability of an answer by plain torch, token by token, of the sequence by itself and without padding."""
    length = int(inputs["attention_mask"][sample, side].sum())
    ids = inputs["input_ids"][sample, side, :length]
    with torch.inference_mode():
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    total = 0.0
    for position in range(1, length):
        if inputs["labels"][sample, side, position] != -100:
            total += logprobs[position - 1, ids[position]].item()
    return total


def test_judged_answers_have_rewards_by_their_judgement() -> None:
    task, inputs, policy = case("kto")
    reference = llama("reference").eval()
    batch = frozen_batch() | {"desirable": frozen("batch")["desirable"]}
    figures = metrics_of(task, evaluate(policy, task, [batch], "cpu"))
    rewards = []
    for sample in range(5):
        difference = answer_logprob(policy, inputs, sample, 0) - answer_logprob(reference, inputs, sample, 0)
        rewards.append(0.1 * difference)
    judgements = [True, False, True, True, False]
    desirable = [reward for reward, good in zip(rewards, judgements, strict=True) if good]
    undesirable = [reward for reward, good in zip(rewards, judgements, strict=True) if not good]
    assert figures["reward_chosen"] == pytest.approx(sum(desirable) / 3, rel=1e-5)
    assert figures["reward_rejected"] == pytest.approx(sum(undesirable) / 2, rel=1e-5)
    assert figures["margin"] == pytest.approx(sum(desirable) / 3 - sum(undesirable) / 2, rel=1e-5)
    right = [(reward > 0) == good for reward, good in zip(rewards, judgements, strict=True)]
    assert figures["accuracy"] == pytest.approx(sum(right) / 5)


def test_margins_of_the_dataset_are_subtracted_from_that_of_rewards() -> None:
    settings = Preference(loss="dpo", reference="none", beta=0.3)
    task = with_preferences(find_task("causal-lm"), settings)
    policy = llama("policy")
    batch = frozen_batch() | {"margins": torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])}
    inputs = task.inputs(batch)
    expected = []
    for sample, margin in enumerate(batch["margins"].tolist()):
        difference = answer_logprob(policy, inputs, sample, 0) - answer_logprob(policy, inputs, sample, 1)
        expected.append(math.log1p(math.exp(-(0.3 * difference - margin))))
    loss = compute_losses(task, policy, inputs).reported
    assert loss.item() == pytest.approx(sum(expected) / 5, rel=1e-5)


def test_stored_log_probabilities_of_a_reference_give_the_same_loss() -> None:
    task, inputs, policy = case("dpo")
    reference = llama("reference").eval()
    stored = torch.zeros(5, 2)
    for sample in range(5):
        for side in range(2):
            stored[sample, side] = answer_logprob(reference, inputs, sample, side)
    from_dataset = with_preferences(find_task("causal-lm"), Preference(loss="dpo", reference="dataset"))
    ours = compute_losses(from_dataset, policy, from_dataset.inputs(frozen_batch() | {"reference_logprobs": stored}))
    assert ours.reported.item() == pytest.approx(compute_losses(task, policy, inputs).reported.item(), rel=1e-5)


OWN = """
import torch

def hinge(inputs):
    difference = inputs.log_ratios[:, 0] - inputs.log_ratios[:, 1]
    return torch.relu(1 - inputs.settings.beta * difference)

def total(inputs):
    return hinge(inputs).sum()

def constant(inputs):
    return torch.zeros(2, requires_grad=True)

def broken(inputs):
    raise KeyError("lost")

def changing(inputs):
    inputs.lengths.clamp_(min=5)
    return hinge(inputs)

def lengthy(inputs):
    if (inputs.lengths > 5).any():
        raise KeyError("lost")
    return hinge(inputs)
"""


@pytest.fixture
def own_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_preferences.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_losses")
def test_loss_of_ones_own_is_trained_on() -> None:
    attempt("preference.loss", "preference_losses", "own_preferences:hinge", None, Job())
    settings = Preference(loss="own_preferences:hinge", reference="none", beta=0.2)
    task = with_preferences(find_task("causal-lm"), settings)
    policy = llama("policy")
    inputs = inputs_of(task)
    expected = 0.0
    for sample in range(5):
        difference = answer_logprob(policy, inputs, sample, 0) - answer_logprob(policy, inputs, sample, 1)
        expected += max(0.0, 1 - 0.2 * difference) / 5
    assert compute_losses(task, policy, inputs).reported.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("own_losses")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("total", r"PLG003.*got \[\]"),
        ("constant", "PLG003.*without a finite gradient"),
        ("broken", "PLG003.*KeyError"),
        ("changing", "PLG003.*a change in place of lengths"),
        ("missing", "PLG002"),
    ],
)
def test_loss_of_ones_own_that_is_none_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt("preference.loss", "preference_losses", f"own_preferences:{name}", None, Job())


@pytest.mark.usefixtures("own_losses")
def test_loss_of_ones_own_that_raises_in_the_middle_of_a_run_is_one_line() -> None:
    attempt("preference.loss", "preference_losses", "own_preferences:lengthy", None, Job())
    task = with_preferences(find_task("causal-lm"), Preference(loss="own_preferences:lengthy", reference="none"))
    inputs = inputs_of(task)
    inputs["labels"] = inputs["input_ids"]
    with pytest.raises(ConfigError, match=r"PLG003.*got KeyError: 'lost'"):
        compute_losses(task, llama("policy"), inputs)
