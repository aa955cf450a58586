"""The loss of a model over a dataset, as sums that can be added up over workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hypha_ray.errors import ConfigError
from hypha_ray.model.flat import Array
from hypha_ray.model.tasks import IGNORED, Batch, Task

_MASKING_SEED = 0


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over scored positions: tokens of a language model, samples of a classifier.

    `correct` counts positions at which a classifier's highest score was right; None for other tasks.
    """

    loss_sum: float
    count: int
    correct: int | None


def evaluate(
    model: torch.nn.Module,
    task: Task,
    batches: Iterable[Batch],
    device: torch.device | str,
    autocast: torch.dtype | None = None,
) -> Sums:
    """Sum a model's loss over batches of slice tensors, in evaluation mode and without gradients.

    The sums don't depend on how samples are cut into batches, nor do a masked language model's hidden tokens, which are
    the same ones every time.

    Args:
        model: on `device`.
        task: makes inputs and labels, and counts them.
        batches: slice tensors on the CPU, samples along the first axis.
        device: where to compute.
        autocast: dtype of mixed precision, or None.

    """
    device = torch.device(device)
    generator = torch.Generator().manual_seed(_MASKING_SEED)
    loss_sum, count = torch.zeros((), dtype=torch.float64, device=device), 0
    correct = torch.zeros((), dtype=torch.int64, device=device)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), torch.autocast(device.type, autocast, enabled=autocast is not None):
            for batch in batches:
                inputs = task.inputs(batch, generator)
                if scored := task.count(inputs):
                    inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
                    output = model(**inputs)
                    loss_sum += loss_of(output).double() * scored
                    count += scored
                    correct += _hits(output, inputs) if task.classifies else 0
    finally:
        model.train(training)
    return Sums(loss_sum.item(), count, int(correct) if task.classifies else None)


def batches_of(slices: Iterable[Mapping[str, Array]], size: int) -> Iterator[dict[str, torch.Tensor]]:
    """Cut slices into batches for `evaluate`, in order; the last one of a slice may be short."""
    for arrays in slices:
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        for start in range(0, max(map(len, arrays.values()), default=0), size):
            yield {name: tensor[start : start + size] for name, tensor in tensors.items()}


def figures(task: Task, sums: Sums) -> dict[str, float]:
    """Return what sums amount to: mean loss, perplexity or accuracy where it makes sense, and the number scored."""
    loss = sums.loss_sum / sums.count if sums.count else math.nan
    if sums.correct is not None:
        return {"val_loss": loss, "accuracy": sums.correct / max(sums.count, 1), "samples": sums.count}
    if task.labels == "samples":
        return {"val_loss": loss, "samples": sums.count}
    return {"val_loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": sums.count}


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model's output, a mean over the positions that the task counts.

    Raises:
        ConfigError: the model gives none.

    """
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            "MODEL012",
            "the model gives no loss for these inputs",
            type(output).__name__,
            fix="choose a task with labels in model.type, or name the tensors it needs in model.input_names",
        )
    return loss.mean()


def _hits(output: Any, inputs: Batch) -> torch.Tensor | int:
    """Count labels that got the highest score, where there is one label for each row of scores."""
    labels, logits = inputs.get("labels"), getattr(output, "logits", None)
    if labels is None or logits is None or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return 0
    hits: torch.Tensor = ((logits.argmax(-1) == labels) & (labels != IGNORED)).sum()
    return hits
