"""Checks of a model's loss on samples before a start: as it is, fused with the head, and sharded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hypha_ray.driver.preflight.compatibility import Case
from hypha_ray.errors import DataError
from hypha_ray.model.checks.fused_check import check_fused_on_copy, head_of, untried
from hypha_ray.model.checks.loss_check import check_loss_on_copy, check_metrics_of
from hypha_ray.model.checks.small_copies import check_on_copy
from hypha_ray.model.evaluation import MASKING_SEED, tensors_of
from hypha_ray.model.loading.build import random_model, task_of
from hypha_ray.model.loading.preprocess import load_special_tokens
from hypha_ray.model.losses import require_mean
from hypha_ray.model.metrics.metric import metrics_named
from hypha_ray.model.tasks.task import Task, missing_mask_token
from hypha_ray.types import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_AT_ONCE = 256
"""Number of samples that are searched at once for something to score."""


def check_loss(case: Case) -> list[str]:
    """Refuse a job whose model has no loss on its dataset, or not that of its task.

    Losses of trainers outside of Ray are unknown here, and aren't checked.

    Returns:
        Notes about tensors of the dataset that the model isn't fed.

    Raises:
        HyphaError: the loss isn't the task's, the model can't be run on the dataset, or nothing in it can be scored.

    """
    job = case.job
    if all(group.bridged for group in job.worker_groups):
        return []
    task, samples = scored_samples(case)
    tried = check_loss_on_copy(
        task, samples, case.network.config, partial(random_model, job.model, case.task), case.facts.parameters
    )
    if job.model.metrics:
        check = partial(check_metrics_of, metrics_named(job.model.metrics), task, samples)
        check_on_copy(check, case.network.config, partial(random_model, job.model, case.task), case.facts.parameters)
    return [*_left_out(case, task, samples), *([] if tried else [_untried(case.network)])]


def scored_samples(case: Case) -> tuple[Task, Samples]:
    """Return the completed task, and training samples of which some are scored.

    Raises:
        HyphaError: the loss can't be had as the job wants it, or nothing in the dataset can be scored.

    """
    job = case.job
    masks = case.task.labels == "masked"
    specials = load_special_tokens(job.preprocessor, case.source.folder, job.model) if masks else None
    task = task_of(job.model, case.network, specials)
    require_mean(task, job.sync.traits)
    tensors = {tensor.name for tensor in case.manifest.tensors}
    if masks and task.masking is None and "labels" not in tensors:
        raise missing_mask_token(task.name)
    return task, _scored(case, task)


def _scored(case: Case, task: Task) -> Samples:
    """Return training samples with something to score; both splits must have some.

    Raises:
        DataError: a split has none.

    """
    for split in ("validation", "train"):
        samples = next((part for part in _samples(case, split) if _count(task, part)), None)
        if samples is None and case.manifest.of(split):
            raise DataError(
                "DATA052",
                f"nothing in {case.manifest.name}/{split} can be scored",
                f"{task.name} ignores all labels",
                fix="prepare the dataset for this task",
            )
    assert samples is not None
    return samples


def _samples(case: Case, split: str) -> Iterator[Samples]:
    """Return a split's samples in parts of a few hundred."""
    for info in case.manifest.of(split):
        arrays = case.source.read(info)
        for start in range(0, info.samples, _AT_ONCE):
            rows = np.arange(start, min(start + _AT_ONCE, info.samples))
            keys = np.stack([np.zeros_like(rows), np.full_like(rows, info.index), rows], axis=1)
            yield Samples({name: array[rows] for name, array in arrays.items()}, keys)


def _count(task: Task, samples: Samples) -> int:
    return task.count(task.inputs(tensors_of(samples), samples.keys, MASKING_SEED))


def _left_out(case: Case, task: Task, samples: Samples) -> list[str]:
    """Return a note for each tensor of the dataset that the model isn't fed, unless the job chooses tensors."""
    if case.job.model.input_names is not None:
        return []
    fed = {name for name, _, _ in task.fed(tensors_of(samples))}
    padding = {"attention_mask"} if "attention_mask" not in task.accepts else set()  # It still marks what is scored.
    left = sorted(set(samples.arrays) - fed - padding)
    takes = f"{type(case.network).__name__} takes none like it"
    return [f"the dataset's tensor {name!r} is left out: {takes}" for name in left]


def _untried(network: PreTrainedModel) -> str:
    return f"no small copy of {type(network).__name__} could be made, so its loss is taken as it is"


def check_fused_loss(case: Case) -> None:
    """Refuse `worker.fused_loss` for a model whose logits are more than a linear layer of hidden states.

    Raises:
        ConfigError: MODEL020.

    """
    job = case.job
    if job.worker.fused_loss is not True or all(group.bridged for group in job.worker_groups):
        return
    head_of(case.task, case.network)
    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if not check_fused_on_copy(task, samples, case.network.config, build, case.facts.parameters):
        raise untried(case.network)


def check_sharding(case: Case) -> None:
    """Refuse a model whose gradient isn't the same when FSDP2 gathers its blocks one by one.

    Raises:
        ConfigError: MODEL023.

    """
    job = case.job
    if job.worker.sharding == "none" or all(job.processes_in(group) == 1 for group in job.worker_groups):
        return
    from hypha_ray.worker.group.sharding_check import check_sharding_on_copy, refused  # Few jobs need it.

    task, samples = scored_samples(case)
    build = partial(random_model, job.model, case.task)
    if not check_sharding_on_copy(job.worker, task, samples, case.network.config, build, case.facts.parameters):
        raise refused(case.network, "no small copy of it could be made to try that")
