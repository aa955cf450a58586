"""Losses of preferences, and their contract: a function of `PreferenceInputs` that returns a loss of each sample, [N].

    dpo     −log σ(β·Δ − margin), smoothed            Δ = (log π − log ref)(chosen) − (log π − log ref)(rejected)
    robust  the same, without the bias of labels that are the wrong way round
    ipo     (δ − 1 / 2β)²                             δ = Δ of means over an answer's tokens
    simpo   −log σ(β·δ − γ), smoothed                 δ of the policy alone
    orpo    −log π of prompt and chosen answer − β·log σ(log odds ratio), both of means over tokens
    kto     1 − σ(±β·(log π − log ref − KL)), weighted; KL is the batch's mean over mismatched answers, at least 0

Normalisation is that of TRL 1.16: `DPOTrainer` with the loss types sigmoid, robust and ipo, `KTOTrainer`, and the
experimental `CPOTrainer` (simpo, with cpo_alpha = 0) and `ORPOTrainer`. The losses of orpo and kto depend on the other
samples of a micro-batch: its number of tokens, and its mean divergence.

Sources: DPO and its smoothing arXiv 2305.18290, robust 2403.00409, margins 2402.10571, IPO 2310.12036,
SimPO 2405.14734, ORPO 2403.07691, KTO 2402.01306.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hypha_ray.config.training import Preference
from hypha_ray.errors import ConfigError
from hypha_ray.model.losses import losses_of_samples
from hypha_ray.plugins import create

MOST_LIKELY = -1e-7
"""Largest mean log-probability of an answer's tokens whose odds are computed; those of certainty are infinite."""


@dataclass(frozen=True, slots=True)
class PreferenceInputs:
    """All that a loss of preferences may depend on; of two sequences of a sample the first has the chosen answer."""

    logprobs: Tensor
    """Sum of the log-probabilities of an answer's tokens by the trained policy, float32 [N, 2]."""
    reference: Tensor
    """The same by the reference, without a gradient; zeros without a reference, [N, 2]."""
    lengths: Tensor
    """Number of an answer's tokens, [N, 2]."""
    text_logprobs: Tensor
    """Sum over all tokens of a sequence but its first, those of the prompt included, [N, 2]."""
    text_lengths: Tensor
    """Number of those tokens, [N, 2]."""
    desirable: Tensor | None
    """Whether the first answer is desirable, bool [N]; None if answers are compared. The second one is another's."""
    margins: Tensor | None
    """Numbers of the dataset by which chosen answers are better, [N]; None if it has none."""
    settings: Preference
    """Table of the job file."""

    @property
    def log_ratios(self) -> Tensor:
        """Log-probabilities of answers relative to the reference, [N, 2]."""
        return self.logprobs - self.reference


PreferenceLoss: TypeAlias = Callable[[PreferenceInputs], Tensor]


def dpo(inputs: PreferenceInputs) -> Tensor:
    """Return the loss of DPO, with conservative smoothing."""
    logits = inputs.settings.beta * _difference(inputs.log_ratios)
    if inputs.margins is not None:
        logits = logits - inputs.margins
    return _smoothed(logits, inputs.settings.label_smoothing)


def robust(inputs: PreferenceInputs) -> Tensor:
    """Return the loss of robust DPO, whose mean isn't changed by labels that are the wrong way round."""
    logits = inputs.settings.beta * _difference(inputs.log_ratios)
    smoothing = inputs.settings.label_smoothing
    clean = -(1 - smoothing) * logsigmoid(logits)
    flipped = -smoothing * logsigmoid(-logits)
    return (clean - flipped) / (1 - 2 * smoothing)


def ipo(inputs: PreferenceInputs) -> Tensor:
    """Return the squared distance of the mean log-ratios' difference from its target."""
    difference = _difference(inputs.log_ratios / _at_least_one(inputs.lengths))
    return (difference - 1 / (2 * inputs.settings.beta)).square()


def simpo(inputs: PreferenceInputs) -> Tensor:
    """Return the loss of SimPO, which has no reference."""
    settings = inputs.settings
    difference = _difference(inputs.logprobs / _at_least_one(inputs.lengths))
    return _smoothed(settings.beta * difference - settings.gamma, settings.label_smoothing)


def orpo(inputs: PreferenceInputs) -> Tensor:
    """Return the loss of ORPO: cross entropy of the chosen text, and the odds ratio of both answers."""
    means = (inputs.logprobs / _at_least_one(inputs.lengths)).clamp(max=MOST_LIKELY)
    odds = means - _log_of_rest(means)
    tokens = _at_least_one(inputs.text_lengths[:, 0].sum())
    cross_entropy = -inputs.text_logprobs[:, 0] * len(means) / tokens
    return cross_entropy - inputs.settings.beta * logsigmoid(_difference(odds))


def kto(inputs: PreferenceInputs) -> Tensor:
    """Return the loss of KTO for answers that are judged one by one."""
    assert inputs.desirable is not None
    settings = inputs.settings
    ratios = inputs.log_ratios
    divergence = ratios[:, 1].detach().mean().clamp(min=0)
    gains = settings.beta * (ratios[:, 0] - divergence)
    desirable = settings.desirable_weight * (1 - torch.sigmoid(gains))
    undesirable = settings.undesirable_weight * (1 - torch.sigmoid(-gains))
    return torch.where(inputs.desirable, desirable, undesirable)


def _difference(values: Tensor) -> Tensor:
    """Value of the chosen answer minus that of the rejected one, [N]."""
    return values[:, 0] - values[:, 1]


def _log_of_rest(logprobs: Tensor) -> Tensor:
    """Logarithm of 1 minus a probability, by the form that cancels less: log(1 − e^x) for x below −ln 2, or above."""
    small = torch.log1p(-torch.exp(logprobs))
    large = torch.log(-torch.expm1(logprobs))
    return torch.where(logprobs < -math.log(2), small, large)


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * logsigmoid(logits) - smoothing * logsigmoid(-logits)


def _at_least_one(lengths: Tensor) -> Tensor:
    return lengths.clamp(min=1)


def try_loss(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a loss on two preferences, and on two judged answers if it raises for those.

    Raises:
        ConfigError: PLG003, it returns something else than a loss of each sample with a gradient.

    """
    loss: PreferenceLoss = create("preference_losses", name, options)
    logprobs = torch.tensor([[-3.0, -4.0], [-6.0, -5.0]], requires_grad=True)
    lengths = torch.tensor([[2, 3], [4, 4]])
    inputs = PreferenceInputs(
        logprobs=logprobs,
        reference=torch.tensor([[-3.5, -3.5], [-5.5, -5.5]]),
        lengths=lengths,
        text_logprobs=logprobs * 2,
        text_lengths=lengths + 2,
        desirable=torch.tensor([True, False]),
        margins=torch.tensor([1.0, 0.5]),
        settings=Preference(loss=name),
    )
    losses = losses_of(loss, inputs)
    losses.mean().backward()
    if logprobs.grad is None or not logprobs.grad.isfinite().all():
        raise _refused("losses without a finite gradient", "losses computed from logprobs")


def losses_of(loss: PreferenceLoss, inputs: PreferenceInputs) -> Tensor:
    """Return the losses of samples, checked against the contract.

    Raises:
        ConfigError: PLG003, the loss raises or returns something else.

    """
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    losses = losses_of_samples(partial(loss, inputs), tensors, len(inputs.logprobs), _refused)
    if inputs.logprobs.requires_grad and not losses.requires_grad:
        raise _refused("losses without a gradient", "losses computed from logprobs")
    return losses


def _refused(got: str, allowed: str) -> ConfigError:
    fix = "see the contract of preference losses in docs/plugins-training.md"
    return ConfigError("PLG003", "preference.loss can't be trained on", got, allowed, fix)
