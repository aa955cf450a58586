"""Training on preferences: losses and their contract, and the way from a batch to losses and figures of rewards.

    input_ids [N, 2, L] ─► policy ────► log-probabilities of answers ─┐
                       └─► reference ─► the same, no gradient ────────┴─► loss of each sample, rewards, accuracy

The reference is a frozen copy of the model as training begins, the base model below an adapter, or log-probabilities
that the dataset has. A loss is a function of `PreferenceInputs` that returns a loss of each sample, [N]:

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

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid, pad

from hypha_ray.config.training import OF_LENGTH, Preference
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.lora import without_adapter
from hypha_ray.model.losses import Losses, forward, losses_of_samples, missing_loss, router_loss
from hypha_ray.model.task import IGNORE_INDEX, Batch, Task
from hypha_ray.plugins import create
from hypha_ray.types import Sums
from hypha_ray.types.events import CHOSEN, REJECTED

MOST_LIKELY = -1e-7
"""Largest mean log-probability of an answer's tokens whose odds are computed; those of certainty are infinite."""
FIGURES: Final = (CHOSEN, REJECTED, "accuracy")
"""Names of figures of an evaluation; the margin of rewards is the difference of the first two."""
TRAINED_FIGURES: Final = (CHOSEN, REJECTED, "train_accuracy")
"""Names of the same figures of training, of weights that change from batch to batch."""
_TENSORS: Final = ("desirable", "margins", "reference_logprobs")
"""Tensors that a dataset of preferences may have beside its sequences."""
Reference: TypeAlias = Callable[[Task, Any, Batch], Tensor]
"""Function of a task, the trained model and inputs that returns log-probabilities of answers, [N, 2]."""


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
    unflipped_loss = -(1 - smoothing) * logsigmoid(logits)
    flipped_loss = -smoothing * logsigmoid(-logits)
    return (unflipped_loss - flipped_loss) / (1 - 2 * smoothing)


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
    log_rest = torch.log1p(-torch.exp(logprobs))
    large = torch.log(-torch.expm1(logprobs))
    return torch.where(logprobs < -math.log(2), log_rest, large)


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


class SequenceScores(NamedTuple):
    """Log-probabilities of the sequences of a batch, float32 [N, 2], with the output of the model."""

    logprobs: Tensor
    lengths: Tensor
    text_logprobs: Tensor
    text_lengths: Tensor
    output: Any


def score_sequences(task: Task, model: Any, inputs: Batch) -> SequenceScores:
    """Run a model on the sequences of a batch.

    Args:
        task: task of a causal language model.
        model: the model, in the mode and precision that are set.
        inputs: ``input_ids``, ``attention_mask`` and ``labels``, each [N, 2, L], on the model's device.

    Raises:
        ConfigError: MODEL012, the model has no logits for each token.

    """
    ids = inputs["input_ids"].flatten(0, 1)
    mask = inputs["attention_mask"].flatten(0, 1)
    labels = inputs["labels"].flatten(0, 1)
    output = forward(task, model, {"input_ids": ids, "attention_mask": mask})
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != ids.shape:
        raise missing_loss(type(output).__name__)
    targets = pad(ids[:, 1:], (0, 1)).long()  # Cutting the logits instead would copy them, and their gradient.
    rows = logits.float().flatten(0, 1)
    logprobs = -cross_entropy(rows, targets.flatten(), reduction="none").view(targets.shape)[:, :-1]
    is_text = mask[:, 1:] != 0
    is_answer = (labels[:, 1:] != IGNORE_INDEX) & is_text
    return SequenceScores(
        _by_sample(logprobs.where(is_answer, 0).sum(1)),
        _by_sample(is_answer.sum(1)),
        _by_sample(logprobs.where(is_text, 0).sum(1)),
        _by_sample(is_text.sum(1)),
        output,
    )


def _by_sample(values: Tensor) -> Tensor:
    return values.view(-1, 2)


class Objective:
    """Loss of preferences with its settings and its reference.

    Args:
        settings: table of the job file, with a loss.
        reference: function of log-probabilities; None: those of the dataset if the settings say so, otherwise zeros.

    Raises:
        ConfigError: the loss can't be had.

    """

    def __init__(self, settings: Preference, reference: Reference | None = None) -> None:
        assert settings.loss is not None
        self._settings = settings
        self._reference = reference
        self._loss: PreferenceLoss = create("preference_losses", settings.loss, settings.loss_options)

    def __call__(self, task: Task, model: Any, inputs: Batch) -> Losses:
        """Return the mean loss of a batch and the sums of its figures.

        Raises:
            ConfigError: PLG003, the loss is none of each sample; MODEL012, the model has no logits.
            DataError: PREF001, the dataset lacks log-probabilities of a reference.

        """
        reference = self._reference_logprobs(task, model, inputs)
        scores = score_sequences(task, model, inputs)
        desirable = inputs.get("desirable")
        preference_inputs = PreferenceInputs(
            logprobs=scores.logprobs,
            reference=reference,
            lengths=scores.lengths,
            text_logprobs=scores.text_logprobs,
            text_lengths=scores.text_lengths,
            desirable=None if desirable is None else desirable != 0,
            margins=inputs.get("margins"),
            settings=self._settings,
        )
        losses = losses_of(self._loss, preference_inputs)
        reported_loss = losses.float().mean()
        figures = self._figures(preference_inputs).detach()
        return Losses(reported_loss, reported_loss + router_loss(model, scores.output), scores.output, figures)

    def _reference_logprobs(self, task: Task, model: Any, inputs: Batch) -> Tensor:
        """Log-probabilities by the reference, [N, 2], without a gradient."""
        if self._settings.uses_reference:
            if self._settings.reference == "dataset":
                return _stored(inputs)
            if self._reference is not None:
                with torch.no_grad():
                    return self._reference(task, model, inputs)
        labels = inputs["labels"]
        return torch.zeros(labels.shape[:2], device=labels.device)

    def _figures(self, inputs: PreferenceInputs) -> Tensor:
        """Sums and weights of the figures, [3, 2]."""
        if self._settings.loss in OF_LENGTH:
            scores = inputs.logprobs / inputs.lengths.clamp(min=1)
        else:
            scores = inputs.log_ratios
        first_scores, second_scores = (self._settings.beta * scores).unbind(1)
        everyone = torch.ones_like(first_scores)
        if inputs.desirable is None:
            chosen = _sum_and_weight(first_scores, everyone)
            rejected = _sum_and_weight(second_scores, everyone)
            is_right = first_scores > second_scores
        else:
            is_desirable = inputs.desirable.to(first_scores.dtype)
            chosen = _sum_and_weight(first_scores, is_desirable)
            rejected = _sum_and_weight(first_scores, 1 - is_desirable)
            is_right = (first_scores > 0) == inputs.desirable
        accuracy = _sum_and_weight(is_right.to(first_scores.dtype), everyone)
        return torch.stack([chosen, rejected, accuracy])


def _sum_and_weight(values: Tensor, weights: Tensor) -> Tensor:
    return torch.stack([(values * weights).sum(), weights.sum()])


def _stored(inputs: Batch) -> Tensor:
    stored = inputs.get("reference_logprobs")
    if stored is None:
        fix = 'prepare the dataset with --reference MODEL, or set preference.reference = "initial"'
        raise DataError("PREF001", "the dataset has no log-probabilities of a reference", fix=fix)
    logprobs: Tensor = stored.float()
    return logprobs


def with_preferences(task: Task, settings: Preference, reference: Reference | None = None) -> Task:
    """Return a task that is trained on preferences; the task itself if the settings have no loss.

    Raises:
        ConfigError: the loss can't be had.

    """
    if settings.loss is None:
        return task
    tensors = task.tensors + tuple((name, name) for name in ("labels", *_TENSORS))
    optional = task.optional | set(_TENSORS)
    objective = Objective(settings, reference)
    return replace(task, objective=objective, tensors=tensors, optional=optional, perplexity=False)


def reference_of(settings: Preference, model: torch.nn.Module, adapted: bool) -> Reference | None:
    """Return the reference of a model that is about to be trained; None if the model itself has no part in it.

    Args:
        settings: table of the job file.
        model: the model with its initial weights.
        adapted: whether an adapter is trained, whose base model is the reference.

    """
    if has_frozen_copy(settings, adapted):
        return reference_model(copy.deepcopy(model).eval().requires_grad_(False))
    if settings.uses_reference and settings.reference == "initial":
        return _base_logprobs
    return None


def has_frozen_copy(settings: Preference, adapted: bool) -> bool:
    """Whether workers hold a frozen copy of the model beside the trained one."""
    return settings.uses_reference and settings.reference == "initial" and not adapted


def reference_model(model: Any, adapted: bool = False) -> Reference:
    """Return the reference that a model in evaluation mode is, or its base below an adapter, whatever is trained."""

    def logprobs(task: Task, trained_model: Any, inputs: Batch) -> Tensor:
        if adapted:
            return _base_logprobs(task, model, inputs)
        return score_sequences(task, model, inputs).logprobs

    return logprobs


def _base_logprobs(task: Task, model: Any, inputs: Batch) -> Tensor:
    """Log-probabilities by the base model below an adapter."""
    training = model.training
    model.eval()
    try:
        with without_adapter(model):
            return score_sequences(task, model, inputs).logprobs
    finally:
        model.train(training)


def disable_dropout(model: torch.nn.Module) -> None:
    """Disable dropout of a model but that of adapters, in place, as TRL does: the reference has none either."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and "lora_" not in name:
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def named_sums(figures: Tensor, names: Sequence[str] = FIGURES) -> Sums:
    """Return the sums and weights of a batch's figures, [figures, 2], by name."""
    sums = {}
    for name, (total, weight) in zip(names, figures.tolist(), strict=True):
        sums[name] = (total, weight)
    return sums
