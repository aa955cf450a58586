"""Training on preferences: from a batch of sequences to the losses of samples and to figures of rewards.

    input_ids [N, 2, L] ─► policy ────► log-probabilities of answers ─┐
                       └─► reference ─► the same, no gradient ────────┴─► loss of each sample, rewards, accuracy

The reference is a frozen copy of the model as training begins, the base model below an adapter, or log-probabilities
that the dataset has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from hypha_ray.config.training import OF_LENGTH, Preference
from hypha_ray.errors import DataError
from hypha_ray.model.lora import without_adapter
from hypha_ray.model.losses import Losses, forward, missing_loss, router_loss
from hypha_ray.model.preferences.losses import PreferenceInputs, PreferenceLoss, losses_of
from hypha_ray.model.task import IGNORE_INDEX, Batch, Task
from hypha_ray.plugins import create
from hypha_ray.types import Sums
from hypha_ray.types.events import CHOSEN, REJECTED

FIGURES: Final = (CHOSEN, REJECTED, "accuracy")
"""Names of figures of an evaluation; the margin of rewards is the difference of the first two."""
TRAINED_FIGURES: Final = (CHOSEN, REJECTED, "train_accuracy")
"""Names of the same figures of training, of weights that change from batch to batch."""
_TENSORS: Final = ("desirable", "margins", "reference_logprobs")
"""Tensors that a dataset of preferences may have beside its sequences."""

Reference: TypeAlias = Callable[[Task, Any, Batch], Tensor]
"""Function of a task, the trained model and inputs that returns log-probabilities of answers, [N, 2]."""


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
    targets = ids[:, 1:].long()
    rows = logits[:, :-1].float()
    logprobs = -cross_entropy(rows.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
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
        reported = losses.float().mean()
        figures = self._figures(preference_inputs).detach()
        return Losses(reported, reported + router_loss(model, scores.output), scores.output, figures)

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
        first, second = (self._settings.beta * scores).unbind(1)
        everyone = torch.ones_like(first)
        if inputs.desirable is None:
            chosen = _sum_and_weight(first, everyone)
            rejected = _sum_and_weight(second, everyone)
            is_right = first > second
        else:
            is_desirable = inputs.desirable.to(first.dtype)
            chosen = _sum_and_weight(first, is_desirable)
            rejected = _sum_and_weight(first, 1 - is_desirable)
            is_right = (first > 0) == inputs.desirable
        accuracy = _sum_and_weight(is_right.to(first.dtype), everyone)
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

    def logprobs(task: Task, trained: Any, inputs: Batch) -> Tensor:
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
