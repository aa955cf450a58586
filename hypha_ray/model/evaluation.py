"""The loss of a model over a dataset, as sums that can be added up over workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from hypha_ray.figures import quality
from hypha_ray.model.flat import Array
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks.masking import SampleKeys
from hypha_ray.model.tasks.task import Batch, Task
from hypha_ray.types import Samples

MASKING_SEED = 0
"""Seed of hidden tokens in evaluations: not the run's, so that whoever scores a model later hides the same ones."""
Evaluated: TypeAlias = Samples | Batch
"""Samples of slices, or bare tensors, whose samples are counted from 0 on."""


@dataclass(frozen=True, slots=True)
class EvaluationSums:
    """Sums over scored positions: tokens of a language model, samples of a classifier.

    `correct` counts positions at which a classifier's highest score was right; None where there are no classes.
    """

    loss_sum: float
    count: int
    correct: int | None


def evaluate(
    model: torch.nn.Module,
    task: Task,
    batches: Iterable[Evaluated],
    device: torch.device | str,
    autocast: torch.dtype | None = None,
) -> EvaluationSums:
    """Sum a model's loss over batches of slice tensors, in evaluation mode and without gradients.

    The sums don't depend on how samples are cut into batches or shared out. A masked language model's hidden tokens
    depend on the slice and the sample's index in it, and are the same ones every time.

    Args:
        model: on `device`.
        task: makes inputs and labels, and counts them.
        batches: on the CPU, samples along the first axis.
        device: where to compute.
        autocast: dtype of mixed precision, or None.

    """
    device = torch.device(device)
    loss_sum, count = torch.zeros((), dtype=torch.float64, device=device), 0
    correct = torch.zeros((), dtype=torch.int64, device=device)
    classes, training = task.classifies, model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            for tensors, keys in _known(batches):
                inputs = task.inputs(tensors, keys, MASKING_SEED)
                if scored := task.count(inputs):
                    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
                    reported, _, output = compute_losses(task, model, inputs)
                    loss_sum += reported.double() * scored
                    count += scored
                    hits = _hits(output, inputs, task) if classes else None
                    classes = hits is not None
                    correct += 0 if hits is None else hits
    finally:
        model.train(training)
    return EvaluationSums(loss_sum.item(), count, int(correct) if classes else None)


def batches_of(
    slices: Iterable[Mapping[str, Array]], size: int, indices: Iterable[int] | None = None
) -> Iterator[Samples]:
    """Cut slices into batches for `evaluate`, in order; the last one of a slice may be short.

    Args:
        slices: tensors by name, samples along the first axis.
        size: samples of a batch.
        indices: of the slices, which a masked language model's hidden tokens depend on; None: they are counted from 0.

    """
    numbers = iter(indices) if indices is not None else None
    for place, arrays in enumerate(slices):
        index = place if numbers is None else next(numbers)
        for start in range(0, max(map(len, arrays.values()), default=0), size):
            part = {name: np.array(array[start : start + size]) for name, array in arrays.items()}
            yield Samples(part, _keys(index, start, len(next(iter(part.values())))))


def tensors_of(samples: Samples) -> dict[str, torch.Tensor]:
    """Return samples as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in samples.arrays.items()}


def metrics_of(task: Task, sums: EvaluationSums) -> dict[str, float | None]:
    """Return what sums amount to: mean loss, perplexity or accuracy where it makes sense, and the number scored."""
    what = "tokens" if task.perplexity or task.labels == "positions" else "samples"
    return {**quality(sums.loss_sum, sums.count, sums.correct, task.perplexity), what: sums.count}


def _known(batches: Iterable[Evaluated]) -> Iterator[tuple[Batch, SampleKeys]]:
    """Return tensors, and which samples they are."""
    seen = 0
    for batch in batches:
        if isinstance(batch, Samples):
            yield tensors_of(batch), _without_epoch(batch.keys)
        else:
            size = len(next(iter(batch.values())))
            yield batch, _keys(0, seen, size)
            seen += size


def _keys(index: int, start: int, size: int) -> SampleKeys:
    """Return the keys of samples that follow each other in a slice."""
    keys = np.zeros((size, 3), np.int64)
    keys[:, 1], keys[:, 2] = index, np.arange(start, start + size)
    return keys


def _without_epoch(keys: SampleKeys) -> SampleKeys:
    found: SampleKeys = keys * np.array([0, 1, 1], np.int64)
    return found


def _hits(output: Any, inputs: Batch, task: Task) -> torch.Tensor | None:
    """Count labels that got the highest score; None unless there is one label for each row of scores."""
    labels, logits = inputs.get("labels"), getattr(output, "logits", None)
    if labels is None or logits is None or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return None
    hits: torch.Tensor = ((logits.argmax(-1) == labels) & (labels != task.ignored)).sum()
    return hits
