"""Loss of a model over a dataset, as sums that add up over workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import torch

from hypha_ray.figures import figures_of
from hypha_ray.model.flat import Array
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.metrics.metric import Metrics, batch_sums, figures_by_name
from hypha_ray.model.tasks.task import Batch, SampleKeys, Task
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
        `val_loss`, and `accuracy` if the task has classes, both over the scored positions; and sums of the metrics.

    """
    device = torch.device(device)
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    count = labels = 0
    own = Sums()
    classes = task.classifies
    training = model.training
    model.eval()
    try:
        with _without_gradients(model), torch.autocast(device.type, autocast, enabled=autocast is not None):
            for inputs, scored, labelled in _scored_inputs(task, batches, device):
                reported, _, output = compute_losses(task, model, inputs, None if metrics else head)
                loss_sum += reported.double() * scored
                count += scored
                labels += labelled
                own = added([own, batch_sums(metrics or {}, task, output, inputs)])
                hits = _hits(output, inputs, task) if classes else None
                classes = hits is not None
                correct += 0 if hits is None else hits
    finally:
        model.train(training)
    sums = {"val_loss": (loss_sum.item(), float(count))}
    return (sums | {"accuracy": (float(correct), float(labels))} if classes else sums) | own


def _scored_inputs(task: Task, batches: Iterable[Evaluated], device: torch.device) -> Iterator[tuple[Batch, int, int]]:
    """Return inputs on the device of batches with something to score, and the numbers of scores and of labels."""
    for tensors, keys in _known(batches):
        inputs = task.inputs(tensors, keys, MASKING_SEED)
        if scored := task.count(inputs):
            labelled = scored if task.own_loss is None else task.labelled(inputs)
            yield {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}, scored, labelled


def batches_of(
    slices: Iterable[Mapping[str, Array]], size: int, indices: Iterable[int] | None = None
) -> Iterator[Samples]:
    """Cut slices into batches for `evaluate`, in order; the last batch of a slice may be short.

    Args:
        slices: tensors of each slice by name, samples along the first axis.
        size: samples in a batch.
        indices: index of each slice, by which tokens are masked; None: slices are numbered from 0.

    """
    numbers = iter(indices) if indices is not None else None
    for place, arrays in enumerate(slices):
        index = place if numbers is None else next(numbers)
        for start in range(0, max(map(len, arrays.values()), default=0), size):
            part = {name: np.array(array[start : start + size]) for name, array in arrays.items()}
            yield Samples(part, _keys(index, start, len(next(iter(part.values())))))


def scored_in_evaluation(task: Task, samples: Samples) -> int:
    """Return the number of positions of samples that `evaluate` scores."""
    return task.count(task.inputs(tensors_of(samples), _without_epoch(samples.keys), MASKING_SEED))


def tensors_of(samples: Samples) -> dict[str, torch.Tensor]:
    """Return samples as tensors that share memory with the arrays."""
    return {name: torch.from_numpy(array) for name, array in samples.arrays.items()}


def metrics_of(task: Task, sums: Sums, metrics: Metrics | None = None) -> dict[str, float | None]:
    """Return mean loss, perplexity or accuracy if the task has one, metrics, and the number of scores."""
    return {**figures_of(sums, task.perplexity, figures_by_name(metrics or {})), task.unit: int(sums["val_loss"][1])}


def _without_gradients(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context without gradients. FSDP2 gathers weights into memory that is used again in training."""
    context: Any = torch.no_grad() if hasattr(model, "unshard") else torch.inference_mode()
    found: AbstractContextManager[None] = context
    return found


def _known(batches: Iterable[Evaluated]) -> Iterator[tuple[Batch, SampleKeys]]:
    """Return each batch's tensors and the keys of its samples."""
    seen = 0
    for batch in batches:
        if isinstance(batch, Samples):
            yield tensors_of(batch), _without_epoch(batch.keys)
        else:
            size = len(next(iter(batch.values())))
            yield batch, _keys(0, seen, size)
            seen += size


def _keys(index: int, start: int, size: int) -> SampleKeys:
    """Return the keys of consecutive samples of a slice."""
    keys = np.zeros((size, 3), np.int64)
    keys[:, 1], keys[:, 2] = index, np.arange(start, start + size)
    return keys


def _without_epoch(keys: SampleKeys) -> SampleKeys:
    found: SampleKeys = keys * np.array([0, 1, 1], np.int64)
    return found


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
    hits: torch.Tensor = ((logits.argmax(-1) == labels) & (labels != task.ignored)).sum()
    return hits
