"""The loss that is trained on, and the one that is reported: of a model's output, for a task.

A language model's loss is the cross entropy of each token by what stands before it, and is made of the logits here:
not every class that transformers has for the purpose shifts its labels. Routers of experts have losses of their own,
which are trained on and not reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, pad

from hypha_ray.errors import ConfigError
from hypha_ray.model.tasks.task import IGNORE_INDEX, Batch, Task

_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


class Losses(NamedTuple):
    """Means over what the task counts."""

    reported: torch.Tensor
    """The task's own loss, on which perplexity is based."""
    trained: torch.Tensor
    """With the routers' losses."""
    output: Any
    """Of the model."""


def compute_losses(task: Task, model: torch.nn.Module, inputs: Batch) -> Losses:
    """Run a model on keyword arguments that the task has made, and return its losses.

    Args:
        task: as `resolve_task` returns it.
        model: the model.
        inputs: keyword arguments, labels included, on the model's device.

    Raises:
        ConfigError: the model gives no loss, or no logits for each token.

    """
    if task.labels == "shifted" and "labels" in inputs:
        output = forward(task, model, {name: tensor for name, tensor in inputs.items() if name != "labels"})
        reported = shifted_cross_entropy(_logits(output), inputs["labels"])
        return Losses(reported, reported + router_loss(model, output), output)
    output = forward(task, model, inputs)
    trained = loss_of(output) / (task.count(inputs) if task.summed else 1)
    return Losses(_plain(output, inputs, trained), trained, output)


def forward(task: Task, model: torch.nn.Module, inputs: Batch) -> Any:
    """Run a model without a key/value cache, which nothing but generation reads and some models can't fill."""
    return model(**inputs, use_cache=False) if task.caches else model(**inputs)


def shifted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each label by the logits of the position before; those of a prefix without labels are left out.

    Raises:
        ConfigError: there are fewer logits than labels.

    """
    if logits.ndim != 3 or logits.shape[1] < labels.shape[1]:
        raise missing_loss(f"logits {list(logits.shape)} for labels {list(labels.shape)}")
    following = pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # To cut the logits instead would copy them.
    return token_cross_entropy(logits[:, -labels.shape[1] :], following)


def token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each label by the logits of its own position."""
    return cross_entropy(logits.float().flatten(0, -2), labels.to(logits.device).flatten(), ignore_index=IGNORE_INDEX)


def router_loss(model: torch.nn.Module, output: Any) -> torch.Tensor | float:
    """Return the routers' loss as the model adds it to its own; 0 where there is none."""
    loss = getattr(output, "aux_loss", None)
    if not isinstance(loss, torch.Tensor):
        return 0.0
    config: Any = model.config
    for where in (model, config, config.get_text_config()):
        for name in _COEFFICIENTS:
            if isinstance(coefficient := getattr(where, name, None), float | int):
                return coefficient * loss
    raise missing_loss(f"{type(model).__name__} has a router's loss, and no known coefficient for it")


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that a model gives of itself.

    Raises:
        ConfigError: the model gives none.

    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise missing_loss(type(output).__name__)
    return loss.mean()


def missing_loss(got: str) -> ConfigError:
    """Return the error for a model that has no loss for what it is fed."""
    return ConfigError(
        "MODEL012",
        "the model gives no loss for these inputs",
        got,
        fix="choose a task with labels in model.type, or name the tensors it needs in model.input_names",
    )


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise missing_loss(type(output).__name__)
    return logits


def _plain(output: Any, inputs: Batch, trained: torch.Tensor) -> torch.Tensor:
    """Return a loss without what routers add, where a model has some."""
    names = [name for name in getattr(output, "keys", dict)() if name.endswith(("aux_loss", "z_loss"))]
    if not names or "labels" not in inputs:
        return trained
    return token_cross_entropy(_logits(output), inputs["labels"])
