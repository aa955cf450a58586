"""Contract of validation metrics, `model.metrics`, and their sums over a batch.

    logits, labels of a batch ──► sums ──╮
                                         ├──► sums of all batches and workers ──► figure
    logits, labels of a batch ──► sums ──╯

Sums are numbers by name, such as counts. They are added up over batches and workers, whatever the division.

Mean of the classes' F1 scores, `macro_f1`.

Share of labels among the five classes of the largest logits, `top5`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from hypha_ray.errors import ConfigError, reason_of
from hypha_ray.figures import METRIC, Figure, metric_figure
from hypha_ray.model.task import Batch, Task
from hypha_ray.plugins import create
from hypha_ray.types import Sums

_CLOSE = 1e-6
"""Largest relative difference of sums that are equal but for rounding."""
_CLASSES = 5


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
    scored = labels != task.ignored
    return logits[scored].float(), labels[scored]


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
    middle = len(labels) // 2
    for figure, metric in metrics.items():
        whole = _sums(figure, metric, logits, labels)
        if middle:
            first = _sums(figure, metric, logits[:middle], labels[:middle])
            second = _sums(figure, metric, logits[middle:], labels[middle:])
            _require_additive(figure, whole, (first, second))
        try:
            value = metric.figure(whole)
        except Exception as error:  # Code of users may raise anything.
            raise _failed(figure, "figure", error) from error
        if not isinstance(value, float | int):
            raise _refused(figure, f"a figure of type {type(value).__name__}", "a number")


def _require_additive(figure: str, whole: Mapping[str, float], parts: Sequence[Mapping[str, float]]) -> None:
    for name, value in whole.items():
        total = sum(part.get(name, 0.0) for part in parts)
        if not math.isclose(total, value, rel_tol=_CLOSE, abs_tol=_CLOSE):
            got = f"{name}: {total:g} for two parts of a batch, {value:g} for the whole"
            raise _refused(figure, got, "sums that add up")


def _sums(figure: str, metric: Metric, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    try:
        sums = metric.sums(logits, labels)
        return {str(name): float(value) for name, value in sums.items()}
    except Exception as error:  # Code of users may raise anything.
        raise _failed(figure, "sums", error) from error


def _failed(figure: str, method: str, error: Exception) -> ConfigError:
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
        for name, both in sums.items():
            if name.startswith("both/"):
                label = name.removeprefix("both/")
                right = sums.get(f"right/{label}", 0.0)
                scores.append(2 * right / both)
        if not scores:
            return float("nan")
        return sum(scores) / len(scores)


class Top5:
    """Top-5 accuracy."""

    def sums(self, logits: torch.Tensor, labels: torch.Tensor) -> Mapping[str, float]:
        """Count labels that are among the first classes, and all labels."""
        classes = min(_CLASSES, logits.shape[-1])
        best = logits.topk(classes, -1).indices
        matches = best == labels[..., None]
        right = matches.any(-1)
        return {"right": float(right.sum()), "all": float(right.numel())}

    def figure(self, sums: Mapping[str, float]) -> float:
        """Return the share; NaN without a label."""
        if not sums.get("all"):
            return float("nan")
        return sums["right"] / sums["all"]
