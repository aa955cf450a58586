"""Completion of a task for one model: the tensors of its forward, its labels and its vocabulary."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from transformers import AutoModelForCausalLM

from hypha_ray.model.tasks.task import Task, masking_of

_ALTERNATIVES = {
    "input_values": ("input_features",),
    "input_features": ("input_values",),
    "pixel_values": ("pixel_values_videos",),
}
"""Other keywords of a tensor, by the keyword in the table."""
_PADDING = {"rnnt": "blank_token_id", "tdt": "pad_token_id"}
"""Configuration key of the label that pads, for tasks whose losses don't ignore -100."""

OWN_CLASSES = ("multiple-choice", "next-sentence-prediction")
"""Tasks whose classes don't depend on the configuration's labels."""


def resolve_task(task: Task, network: Any, preprocessor: Any | None, explicit: bool) -> Task:
    """Complete a task for a model.

    Args:
        task: entry of the table.
        network: model with or without weights.
        preprocessor: tokenizer with the mask token, or None.
        explicit: the job chooses the task's tensors, and no others are fed.

    Raises:
        ConfigError: the mask token is outside of the model's vocabulary.

    """
    config = network.config
    takes = parameters(network)
    task = replace(task, caches=_caches(network))
    if not explicit:
        task = replace(task, tensors=_pairs(task, takes), accepts=takes)
    if task.labels == "masked":
        task = replace(task, masking=masking_of(config, preprocessor))
    if task.labels == "pixels":
        task = replace(task, ignored=getattr(config, "semantic_loss_ignore_index", task.ignored))
    if task.name in _PADDING:
        task = replace(task, ignored=getattr(config, _PADDING[task.name]))
    if task.name == "ctc":
        task = replace(task, summed=getattr(config, "ctc_loss_reduction", None) == "sum")
    if task.name == "pretraining" and type(network) in AutoModelForCausalLM._model_mapping.values():
        task = replace(task, labels="shifted", optional=task.optional | {"labels"})
    problem = getattr(config, "problem_type", None)
    if task.labels == "samples" and task.classifies and task.name not in OWN_CLASSES:
        measures = problem in ("regression", "multi_label_classification") or (not problem and config.num_labels == 1)
        task = replace(task, measures=measures, classifies=not measures)
    return task


def parameters(network: Any) -> frozenset[str]:
    """Return the names of a forward's parameters."""
    signature = inspect.signature(network.forward)
    return frozenset(signature.parameters) - {"self", "args", "kwargs"}


def _caches(network: Any) -> bool:
    """Return whether a forward takes `use_cache`, itself or to pass on to its base model."""
    arguments = inspect.signature(network.forward).parameters
    if "use_cache" in arguments:
        return True
    return "kwargs" in arguments and "use_cache" in parameters(network.base_model)


def _pairs(task: Task, takes: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Return the tensors that the model takes, with its keywords; all of them if its forward names none."""
    pairs: list[tuple[str, str]] = []
    for name, keyword in task.tensors:
        for alternative in (keyword, *_ALTERNATIVES.get(keyword, ())):
            if alternative in takes:
                pairs.append((name, alternative))
                break
    if not pairs:
        return task.tensors
    for pair in task.tensors:
        if pair[1] == "labels" and pair not in pairs:
            pairs.append(pair)
    return tuple(pairs)
