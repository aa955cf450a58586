"""Metrics and loss of a model over a dataset, as sums that add up over batches and workers, whatever the division.

A metric gives the sums of a batch, and makes a figure of all sums. Sums are numbers by name, such as counts.

    logits, labels of a batch ──► sums ──╮
                                         ├──► sums of all batches and workers ──► figure
    logits, labels of a batch ──► sums ──╯

Built-in metrics are the mean of the classes' F1 scores, `macro_f1`, and the share of labels among the five classes of
the largest logits, `top5`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch

from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.figures import METRIC, Figure, figures_of, metric_figure
from hypha_ray.model.flat import Array
from hypha_ray.model.losses import Losses, compute_losses
from hypha_ray.model.preferences.losses import named_sums
from hypha_ray.model.task import Batch, SampleKeys, Task, batch_size
from hypha_ray.plugins import create
from hypha_ray.types import Samples, Sums, added

_CLOSE = 1e-6
"""Largest relative difference of sums that differ only by rounding."""
_CLASSES = 5
MASKING_SEED = 0
"""Seed of masked tokens in evaluations. It isn't the run's seed, so that a later evaluation masks the same tokens."""
Evaluated: TypeAlias = Samples | Batch
"""Samples of slices, or bare tensors whose samples are numbered from 0."""


class Metric(Protocol):
    """A metric of predictions."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Return what a batch adds to the sums; a name that other batches lack counts as 0 there.

        Args:
            logits: scores of classes, float [positions, classes]; of numbers the predictions, [samples, numbers].
            labels: class of each position, int64 [positions]; of numbers [samples] or [samples, numbers].

        """

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the metric by the sums of all batches; NaN: it can't be told."""


Metrics: TypeAlias = Mapping[str, Metric]
"""Metrics by the names of their figures, such as ``metric/macro_f1``."""


def metrics_named(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics of a job by the names of their figures.

    Args:
        names: value of `model.metrics`.

    Raises:
        ConfigError: a metric can't be loaded.

    """
    return {metric_figure(name): create("metrics", name) for name in names}


def figures_by_name(metrics: Metrics) -> dict[str, Figure]:
    """Return the functions that make figures of sums."""
    return {name: metric.figure for name, metric in metrics.items()}


def batch_sums(metrics: Metrics, task: Task, output: Any, inputs: Batch) -> Sums:
    """Return the sums of a batch, by the names of figures and of their sums.

    Raises:
        ConfigError: MODEL024, the task has no logits and labels, or a metric fails.

    """
    if not metrics:
        return {}
    logits, labels = scored_pairs(task, output, inputs)
    sums: Sums = {}
    for figure, metric in metrics.items():
        for name, value in _sums(figure, metric, logits, labels).items():
            sums[f"{figure}/{name}"] = (value, 1.0)
    return sums


def scored_pairs(task: Task, output: Any, inputs: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and labels of the positions that the task scores.

    Raises:
        ConfigError: MODEL024, the model has no logits for each label.

    """
    logits = getattr(output, "logits", None)
    labels = inputs.get("labels")
    if not isinstance(logits, torch.Tensor) or labels is None:
        raise _without_pairs(task, "no logits or no labels")
    if labels.is_floating_point():
        return logits.float(), labels
    if task.labels == "shifted":
        logits = logits[:, -labels.shape[1] : -1]
        labels = labels[:, 1:]
    if labels.shape == (*logits.shape[:-1], 1) and logits.shape[-1] > 1:
        labels = labels.squeeze(-1)
    if labels.shape != logits.shape[:-1]:
        got = f"logits {list(logits.shape)} for labels {list(labels.shape)}"
        raise _without_pairs(task, got)
    is_scored = labels != task.ignored
    return logits[is_scored].float(), labels[is_scored]


def try_metric(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a metric on logits of three classes.

    Raises:
        ConfigError: MODEL024, it fails, or its sums depend on how positions are divided.

    """
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [0.0, 4.0, 1.0], [1.0, 0.0, 2.0]])
    metric: Metric = create("metrics", name, options)
    _check({metric_figure(name): metric}, logits, torch.tensor([0, 2, 1, 1]))


def check_metrics(metrics: Metrics, task: Task, output: Any, inputs: Batch) -> None:
    """Try metrics on a batch, and on two parts of it, whose sums have to add up to its own.

    Raises:
        ConfigError: MODEL024, the task has no logits and labels, or a metric fails or depends on the division.

    """
    _check(metrics, *scored_pairs(task, output, inputs))


def _check(metrics: Metrics, logits: torch.Tensor, labels: torch.Tensor) -> None:
    half_batch = len(labels) // 2
    for figure, metric in metrics.items():
        own_logits = logits.clone()
        own_labels = labels.clone()
        whole_sums = _sums(figure, metric, own_logits, own_labels)
        if not (_are_equal(own_logits, logits) and _are_equal(own_labels, labels)):
            raise _refused(figure, "a change in place of what it gets", "logits and labels as they were given")
        if half_batch:
            first_sums = _sums(figure, metric, logits[:half_batch], labels[:half_batch])
            second = _sums(figure, metric, logits[half_batch:], labels[half_batch:])
            _require_additive(figure, whole_sums, (first_sums, second))
        try:
            value = metric.figure(whole_sums)
        except (Exception, SystemExit) as error:  # Code of users may raise anything.
            raise _failed(figure, "figure", error) from error
        if not isinstance(value, float | int):
            raise _refused(figure, f"a figure of type {type(value).__name__}", "a number")


def _are_equal(values: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether values are those of another tensor, NaN included."""
    return torch.allclose(values, expected, rtol=0.0, atol=0.0, equal_nan=True)


def _require_additive(figure: str, whole_sums: Mapping[str, float], parts: Sequence[Mapping[str, float]]) -> None:
    for name, value in whole_sums.items():
        total = sum(part.get(name, 0.0) for part in parts)
        if not math.isclose(total, value, rel_tol=_CLOSE, abs_tol=_CLOSE):
            got = f"{name}: {total:g} for two parts of a batch, {value:g} for the whole"
            raise _refused(figure, got, "sums that add up")


def _sums(figure: str, metric: Metric, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    try:
        sums = metric.sums(logits, labels)
        return {str(name): float(value) for name, value in sums.items()}
    except (Exception, SystemExit) as error:  # Code of users may raise anything.
        raise _failed(figure, "sums", error) from error


def _failed(figure: str, method: str, error: BaseException) -> ConfigError:
    reason = reason_of(error)
    return _refused(figure, f"{method}: {reason}", "numbers by name, and one number of their sums")


def _refused(figure: str, got: str, allowed: str) -> ConfigError:
    name = figure.removeprefix(METRIC)
    fix = "see the contract of metrics in docs/plugins-training.md"
    return ConfigError("MODEL024", f"model.metrics: {name} fails", got, allowed, fix)


def _without_pairs(task: Task, got: str) -> ConfigError:
    problem = f"model.metrics: a {task.name} model has no logits for each label"
    return ConfigError("MODEL024", problem, got, "logits of classes or numbers", "leave model.metrics out")


class MacroF1:
    """Unweighted mean of F1 over the classes that are labelled or predicted, as scikit-learn's `macro` average."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Count by class the right predictions, and the predictions and labels together."""
        predicted = logits.argmax(-1)
        sums: Counter[str] = Counter()
        for label in labels[predicted == labels].tolist():
            sums[f"right/{label}"] += 1
        for label in torch.cat([predicted, labels]).tolist():
            sums[f"both/{label}"] += 1
        return sums

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the mean over classes; NaN without one."""
        scores: list[float] = []
        for name, sum_and_weight in sums.items():
            if name.startswith("both/"):
                label = name.removeprefix("both/")
                right = sums.get(f"right/{label}", 0.0)
                scores.append(2 * right / sum_and_weight)
        if not scores:
            return float("nan")
        return sum(scores) / len(scores)


class Top5:
    """Top-5 accuracy."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Count labels that are among the first classes, and all labels."""
        classes = min(_CLASSES, logits.shape[-1])
        best = logits.topk(classes, -1).indices
        is_match = best == labels[..., None]
        right = is_match.any(-1)
        return {"right": float(right.sum()), "all": float(right.numel())}

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the share; NaN without a label."""
        if not sums.get("all"):
            return float("nan")
        return sums["right"] / sums["all"]


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
        head: layer that a language model's loss is fused with; None: it isn't fused, as always with metrics.
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
    slices: Iterable[Mapping[str, Array]], batch_samples: int, indices: Iterable[int] | None = None
) -> Iterator[Samples]:
    """Cut slices into batches for `evaluate`, in order; the last batch of a slice may be short.

    Args:
        slices: tensors of each slice by name, samples along the first axis.
        batch_samples: samples in a batch.
        indices: index of each slice, by which tokens are masked; None: slices are numbered from 0.

    """
    slice_indices = count() if indices is None else iter(indices)
    for arrays in slices:
        index = next(slice_indices)
        samples = max(map(len, arrays.values()), default=0)
        for start in range(0, samples, batch_samples):
            part = {name: np.array(array[start : start + batch_samples]) for name, array in arrays.items()}
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
            samples = batch_size(batch)
            yield batch, _keys(0, start, samples)
            start += samples


def _keys(index: int, start: int, samples: int) -> SampleKeys:
    """Return the keys of consecutive samples of a slice."""
    keys = np.zeros((samples, 3), np.int64)
    keys[:, 1] = index
    keys[:, 2] = np.arange(start, start + samples)
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
        labels = labels.squeeze(-1)  # Losses also take a column with one class for each sample.
    if logits.shape[:-1] != labels.shape:
        return None
    is_right = logits.argmax(-1) == labels
    is_scored = labels != task.ignored
    hits: torch.Tensor = (is_right & is_scored).sum()
    return hits
