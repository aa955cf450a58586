"""Training loss and reported loss of a model's output.

A language model's loss is the cross entropy of each token given the tokens before it. It is computed here from the
logits, because not every causal class of transformers shifts its labels. The auxiliary loss of an expert router is
part of the training loss, but not of the reported one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, pad

from hypha_ray.config.strategy import StrategyTraits
from hypha_ray.errors import ConfigError
from hypha_ray.model.tasks.task import IGNORE_INDEX, Batch, Task

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class Losses(NamedTuple):
    """Means over the scores that the task counts."""

    reported: torch.Tensor
    """Loss of the task alone, on which perplexity is based."""
    trained: torch.Tensor
    """Loss to differentiate: the reported one and the routers' auxiliary loss."""
    output: Any
    """Output object of the model."""


def compute_losses(task: Task, model: torch.nn.Module, inputs: Batch) -> Losses:
    """Run a model on a task's keyword arguments and return its losses.

    Args:
        task: task from `resolve_task`.
        model: model to run, in the mode and precision that are set.
        inputs: keyword arguments with labels, on the model's device.

    Raises:
        ConfigError: the model returns no loss, or no logits for each token.

    """
    if task.labels == "shifted" and "labels" in inputs:
        output = forward(task, model, {name: tensor for name, tensor in inputs.items() if name != "labels"})
        reported = shifted_cross_entropy(_logits(output), inputs["labels"])
        return Losses(reported, reported + router_loss(model, output), output)
    output = forward(task, model, inputs)
    trained = loss_of(output) / (task.count(inputs) if task.summed else 1)
    return Losses(_plain(output, inputs, trained), trained, output)


def require_mean(task: Task, traits: StrategyTraits) -> None:
    """Refuse a loss that is a sum in synchronous training, whose steps take means.

    Raises:
        ConfigError: the loss is a sum, and the strategy sends gradients.

    """
    if task.summed and traits.sends_gradients:
        raise ConfigError(
            "CFG011",
            'ctc_loss_reduction = "sum" and sync.strategy = "sync" exclude each other: a synchronous step takes a mean',
            fix='set ctc_loss_reduction = "mean", or another sync.strategy',
        )


def forward(task: Task, model: torch.nn.Module, inputs: Batch) -> Any:
    """Run a model without a key/value cache: only generation reads one, and some models fail to fill it."""
    return model(**inputs, use_cache=False) if task.caches else model(**inputs)


def shifted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each label given the logits one position earlier.

    Logits of a prefix that has no labels, such as an image's patches, are skipped.

    Raises:
        ConfigError: there are fewer logits than labels.

    """
    if logits.ndim != 3 or logits.shape[1] < labels.shape[1]:
        raise missing_loss(f"logits {list(logits.shape)} for labels {list(labels.shape)}")
    following = pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # Cutting the logits instead would copy them.
    return token_cross_entropy(logits[:, -labels.shape[1] :], following)


def token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each label given the logits at its own position."""
    return cross_entropy(logits.float().flatten(0, -2), labels.to(logits.device).flatten(), ignore_index=IGNORE_INDEX)


def router_loss(model: torch.nn.Module, output: Any) -> torch.Tensor | float:
    """Return the routers' auxiliary loss, scaled as the model scales it; 0 if the model has no routers."""
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, torch.Tensor):
        return 0.0
    config: Any = model.config
    for where in (model, config, config.get_text_config()):
        for name in _COEFFICIENTS:
            if isinstance(coefficient := getattr(where, name, None), float | int):
                return coefficient * loss
    raise missing_loss(f"{type(model).__name__} has an auxiliary loss, but no known coefficient for it")


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        ConfigError: the output has none.

    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise missing_loss(type(output).__name__)
    return loss.mean()


def missing_loss(got: str) -> ConfigError:
    """Return the error for a model that computes no loss from its inputs."""
    return ConfigError(
        "MODEL012",
        "the model computes no loss from these inputs",
        got,
        fix="choose a task with labels in model.type, or name the tensors it needs in model.input_names",
    )


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise missing_loss(type(output).__name__)
    return logits


def _plain(output: Any, inputs: Batch, trained: torch.Tensor) -> torch.Tensor:
    """Return the loss without auxiliary terms, which a few sequence-to-sequence models add to it."""
    names = [name for name in getattr(output, "keys", dict)() if name.endswith(("aux_loss", "z_loss"))]
    if not names or "labels" not in inputs:
        return trained
    return token_cross_entropy(_logits(output), inputs["labels"])
