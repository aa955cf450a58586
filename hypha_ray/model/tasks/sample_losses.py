"""Contract of losses of models, `model.loss`: a function of a model's output and of its inputs.

    function(output, inputs) ──► a loss of each sample

The training loss is their mean. A sample counts 1, whatever its length, so the division into batches changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from hypha_ray.config.schema import Model
from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.tasks.task import Batch, Task
from hypha_ray.plugins import create


def with_own_loss(task: Task, model: Model) -> Task:
    """Return a task with the loss that a job brings; the task itself if it brings none.

    Raises:
        ConfigError: the loss can't be had.

    """
    return task if model.loss is None else task.scored_by(create("model_losses", model.loss, model.loss_options))


def sample_losses(task: Task, output: Any, inputs: Batch) -> torch.Tensor:
    """Return the losses of samples, if they have the form that the contract wants.

    Args:
        task: task with a loss of its own.
        output: output object of the model.
        inputs: keyword arguments of the model, with labels.

    Raises:
        ConfigError: MODEL025, the loss raises or returns something else.

    """
    assert task.own_loss is not None
    allowed = f"a loss of each sample, [{len(next(iter(inputs.values())))}]"
    try:
        losses = task.own_loss(output, inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Code of users may raise anything.
        raise _refused(reason_of(error), allowed) from error
    if not isinstance(losses, torch.Tensor):
        raise _refused(type(losses).__name__, allowed)
    if losses.shape != (len(next(iter(inputs.values()))),):
        raise _refused(str(list(losses.shape)), allowed)
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise _refused("losses without a gradient", "losses computed from the output")
    return losses


def _refused(got: str, allowed: str) -> ConfigError:
    return ConfigError(
        "MODEL025",
        "model.loss can't be trained on",
        got,
        allowed,
        "see the contract of losses in docs/plugins-training.md",
    )
