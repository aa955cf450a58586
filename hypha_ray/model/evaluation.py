"""Loss of a model over a dataset, as sums that add up over workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from hypha_ray.figures import figures_of
from hypha_ray.model.flat import Array
from hypha_ray.model.losses import Losses, compute_losses
from hypha_ray.model.metrics import Metrics, batch_sums, figures_by_name
from hypha_ray.model.preferences.objective import named_sums
from hypha_ray.model.task import Batch, SampleKeys, Task, batch_size
from hypha_ray.types import Samples, Sums, added

MASKING_SEED = 0
"""Seed of masked tokens in evaluations. It isn't the run's seed, so that a later evaluation masks the same tokens."""
Evaluated: TypeAlias = Samples | Batch
"""Samples of slices, or bare tensors whose samples are numbered from 0."""


def evaluate(
    model: torch.nn.Module,
    task: Task,
    batches: Iterable[Evaluated],
    device: torch.device | str,
    autocast: torch.dtype | None = None,
    head: torch.nn.Linear | None = None,
    metrics: Metrics | None = None,
) -> Sums:
    """Sum a model's loss over batches of slice tensors, in evaluation mode and without gradients.

    The sums don't depend on how samples are cut into batches or shared between workers. Tokens are masked by slice and
    by index in the slice, so every evaluation masks the same ones.

    Args:
        model: model on `device`.
        task: task that makes inputs and labels, and counts scores.
        batches: batches on the CPU, samples along the first axis.
        device: device to compute on.
        autocast: dtype of mixed precision; None: full precision.
        head: layer that a language model's loss is fused with; None: it isn't fused. Beside metrics it never is.
        metrics: metrics of the job, by the names of their figures; None: there are none.

    Returns:
        `val_loss` and, of classes, `accuracy` over scored positions; sums of metrics, and of preferences' rewards.

    """
    device = torch.device(device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    score_count = label_count = 0
    metric_sums = Sums()
    has_accuracy = task.classifies
    precision = torch.autocast(device.type, autocast, enabled=autocast is not None)
    with _evaluation_mode(model), _without_gradients(model), precision:
        for inputs, scored, labelled in _scored_inputs(task, batches, device):
            losses = compute_losses(task, model, inputs, None if metrics else head)
            loss_sum += losses.reported.double() * scored
            score_count += scored
            label_count += labelled
            metric_sums = added([metric_sums, _further_sums(task, losses, inputs, metrics or {})])
            hits = _hits(losses.output, inputs, task) if has_accuracy else None
            if hits is None:
                has_accuracy = False
            else:
                correct += hits
    sums: Sums = {"val_loss": (loss_sum.item(), float(score_count))}
    if has_accuracy:
        sums["accuracy"] = (float(correct), float(label_count))
    return sums | metric_sums


def _further_sums(task: Task, losses: Losses, inputs: Batch, metrics: Metrics) -> Sums:
    """Return the sums of a batch's metrics and of its rewards, if it has any."""
    sums = batch_sums(metrics, task, losses.output, inputs)
    if losses.figures is not None:
        sums |= named_sums(losses.figures)
    return sums


def _scored_inputs(task: Task, batches: Iterable[Evaluated], device: torch.device) -> Iterator[tuple[Batch, int, int]]:
    """Return inputs on the device of batches with something to score, and the numbers of scores and of labels."""
    for tensors, keys in _with_keys(batches):
        inputs = task.inputs(tensors, keys, MASKING_SEED)
        scored = task.count(inputs)
        if scored:
            labelled = task.label_count(inputs) if task.counts_samples else scored
            inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
            yield inputs, scored, labelled


def batches_of(
    slices: Iterable[Mapping[str, Array]], size: int, indices: Iterable[int] | None = None
) -> Iterator[Samples]:
    """Cut slices into batches for `evaluate`, in order; the last batch of a slice may be short.

    Args:
        slices: tensors of each slice by name, samples along the first axis.
        size: samples in a batch.
        indices: index of each slice, by which tokens are masked; None: slices are numbered from 0.

    """
    slice_indices = count() if indices is None else iter(indices)
    for arrays in slices:
        index = next(slice_indices)
        samples = max(map(len, arrays.values()), default=0)
        for start in range(0, samples, size):
            part = {name: np.array(array[start : start + size]) for name, array in arrays.items()}
            yield Samples(part, _keys(index, start, batch_size(part)))


def scored_in_evaluation(task: Task, samples: Samples) -> int:
    """Return the number of positions of samples that `evaluate` scores."""
    inputs = task.inputs(tensors_of(samples), _without_epoch(samples.keys), MASKING_SEED)
    return task.count(inputs)


def tensors_of(samples: Samples) -> dict[str, torch.Tensor]:
    """Return samples as tensors that share memory with the arrays."""
    return {name: torch.from_numpy(array) for name, array in samples.arrays.items()}


def metrics_of(task: Task, sums: Sums, metrics: Metrics | None = None) -> dict[str, float | None]:
    """Return mean loss, perplexity or accuracy if the task has one, metrics, and the number of scores."""
    figures = figures_of(sums, task.perplexity, figures_by_name(metrics or {}))
    _, scored = sums["val_loss"]
    return {**figures, task.unit: int(scored)}


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, and afterwards back to what they were."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _without_gradients(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context without gradients.

    FSDP2 gathers weights into memory that training uses again, which inference mode would spoil.
    """
    if hasattr(model, "unshard"):
        return cast("AbstractContextManager[None]", torch.no_grad())
    return cast("AbstractContextManager[None]", torch.inference_mode())


def _with_keys(batches: Iterable[Evaluated]) -> Iterator[tuple[Batch, SampleKeys]]:
    """Return each batch's tensors and the keys of its samples."""
    start = 0
    for batch in batches:
        if isinstance(batch, Samples):
            yield tensors_of(batch), _without_epoch(batch.keys)
        else:
            size = batch_size(batch)
            yield batch, _keys(0, start, size)
            start += size


def _keys(index: int, start: int, size: int) -> SampleKeys:
    """Return the keys of consecutive samples of a slice."""
    keys = np.zeros((size, 3), np.int64)
    keys[:, 1] = index
    keys[:, 2] = np.arange(start, start + size)
    return keys


def _without_epoch(keys: SampleKeys) -> SampleKeys:
    keys = keys.copy()
    keys[:, 0] = 0
    return keys


def _hits(output: Any, inputs: Batch, task: Task) -> torch.Tensor | None:
    """Count labels with the highest score; None unless there is one label for each row of scores."""
    labels = inputs.get("labels")
    logits = getattr(output, "logits", None)
    if labels is None or logits is None or labels.is_floating_point():
        return None
    if labels.shape == (*logits.shape[:-1], 1) and logits.shape[-1] > 1:
        labels = labels.squeeze(-1)  # One class of each sample in a column, which losses take as well.
    if logits.shape[:-1] != labels.shape:
        return None
    is_right = logits.argmax(-1) == labels
    is_scored = labels != task.ignored
    hits: torch.Tensor = (is_right & is_scored).sum()
    return hits
