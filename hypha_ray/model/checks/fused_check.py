"""Check that a model's logits are those of a plain linear head, so that its loss may be fused with the head.

Some models scale, cap or shift logits behind their head, or feed it with something else. A small copy shows that.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.model.checks.loss_check import choose_samples
from hypha_ray.model.checks.small_copies import Build, check_on_copy
from hypha_ray.model.evaluation import MASKING_SEED, tensors_of
from hypha_ray.model.losses import bypassed_head, forward
from hypha_ray.model.task import Task
from hypha_ray.types import Samples

_CLOSE: Final = 1e-5
"""Largest difference of two logits, relative to the largest logit."""


def head_of(task: Task, network: Any) -> torch.nn.Linear:
    """Return the head that the loss of a language model may be fused with.

    Raises:
        ConfigError: MODEL020, the model is of another task, or has no linear head, or one with an adapter.

    """
    head = network.get_output_embeddings() if task.labels == "shifted" else None
    if head is None:
        raise _refused(network, task.name)
    if type(head) is not torch.nn.Linear:
        raise _refused(network, f"{task.name} with {type(head).__name__}")
    return head


def check_fused_on_copy(task: Task, samples: Samples, config: Any, build: Build, parameters: int) -> bool:
    """Compare logits of a small copy of the model with those that its head makes of hidden states.

    Args:
        task: task from `resolve_task`.
        samples: samples of the dataset.
        config: configuration of the model.
        build: function that makes a model from a configuration.
        parameters: number of the model's parameters.

    Returns:
        Whether a copy could be built and checked.

    Raises:
        ConfigError: MODEL020, they differ.

    """
    return check_on_copy(lambda network: _check(task, network, samples), config, build, parameters)


def no_copy_error(network: Any) -> ConfigError:
    """Return the error for a model of which no copy could be made."""
    return _refused(network, "no small copy of it could be made to try that")


def _check(task: Task, network: Any, samples: Samples) -> None:
    few = choose_samples(task, samples)
    head = head_of(task, network)
    inputs = task.inputs(tensors_of(few), few.keys, MASKING_SEED)
    inputs.pop("labels", None)
    with torch.inference_mode():
        expected = forward(task, network, inputs).logits
        try:
            with bypassed_head(head):
                hidden = forward(task, network, inputs).logits
            logits = head(hidden)
        except Exception as error:  # The model computes something with logits that fails with hidden states.
            raise _refused(network, reason_of(error)) from error
    if logits.shape != expected.shape or (logits - expected).abs().max() > _CLOSE * expected.abs().max():
        raise _refused(network, "logits that aren't those of its head")


def _refused(network: Any, reason: str) -> ConfigError:
    problem = f"worker.fused_loss: {type(network).__name__} has no loss that can be fused with its head"
    return ConfigError("MODEL020", problem, reason, "logits of a linear layer", "leave it out")
