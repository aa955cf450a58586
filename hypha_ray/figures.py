"""Figures of an evaluation, the same for a run and for `jobs/evaluate.py`, and the one that weights are compared by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypha_ray.types import Sums
from hypha_ray.types.events import CHOSEN, MARGIN, REJECTED

METRIC = "metric/"
"""Beginning of the names of a job's own metrics."""
_TASK_FIGURE = re.compile(rf"accuracy|pass@\d+|{METRIC}.+")
Figure: TypeAlias = Callable[[Mapping[str, float]], float]
"""Figure by its sums."""


@dataclass(frozen=True, slots=True)
class Objective:
    """Figure by which the weights of a run are compared, and the others that are shown with it."""

    name: str
    """Name in evaluations."""
    trained: str
    """Name of the same figure of training, in records of rounds."""
    validated: str
    """Name of the evaluation's figure beside that of training."""
    best: Callable[..., Any]
    """Choice of the best record: `min` or `max`."""
    beside: tuple[str, ...] = ()
    """Names of further figures of an evaluation."""


LOSS = Objective("val_loss", "loss", "val_loss", min, ("perplexity", "accuracy", "margin"))
OBJECTIVES = (Objective("reward", "reward", "val_reward", max, ("pass@1",)), LOSS)
"""Objectives of all tasks: a run's is the first that its evaluations have."""


def task_figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Figures by name that measure a task's success: accuracy, metrics of the job, or shares of solved prompts."""
    figures = {}
    for name, value in evaluation.items():
        if value is not None and _TASK_FIGURE.fullmatch(name):
            figures[name] = float(value)
    return figures


def objective_of(records: Iterable[Mapping[str, Any]]) -> Objective:
    """Objective of a run by its evaluations; the loss if there are none."""
    records = list(records)
    for objective in OBJECTIVES:
        for record in records:
            if record.get(objective.name) is not None:
                return objective
    return LOSS


def metric_figure(name: str) -> str:
    """Name of the figure of one of the job's own metrics; of a metric ``module:object`` it has the object's name."""
    _, _, object_name = name.rpartition(":")
    return f"{METRIC}{object_name}"


def shown_beside(objective: Objective, record: Mapping[str, Any]) -> list[str]:
    """Names of further figures of an evaluation that are shown with the objective, as far as it has them."""
    built_in = [name for name in objective.beside if name in record]
    own_metrics = [name for name in record if name.startswith(METRIC)]
    return built_in + own_metrics


def figures_of(sums: Sums, perplexity: bool, metrics: Mapping[str, Figure] | None = None) -> dict[str, float | None]:
    """Mean of each figure, and the perplexity of a loss unless there is an accuracy.

    Args:
        sums: figures of an evaluation.
        perplexity: the loss is the cross entropy of tokens, in nats.
        metrics: the job's own metrics, by the names of their figures; None: there are none.

    Returns:
        Figures by name; None for one that isn't finite, and for one without weight.

    """
    figures: dict[str, float | None] = {}
    for name, (value, weight) in sums.items():
        if not name.startswith(METRIC):
            figures[name] = _mean(value, weight)
    chosen = figures.get(CHOSEN)
    rejected = figures.get(REJECTED)
    if chosen is not None and rejected is not None:
        figures[MARGIN] = chosen - rejected
    if perplexity and "val_loss" in figures and "accuracy" not in figures:
        figures["perplexity"] = _exp(figures["val_loss"])
    for name, figure in (metrics or {}).items():
        figures[name] = _metric(name, figure, sums)
    return figures


def _metric(name: str, figure: Figure, sums: Sums) -> float | None:
    """Return a metric by its sums; None without sums, if its code fails, or if it isn't finite."""
    prefix = f"{name}/"
    own_sums = {}
    for key, (value, _) in sums.items():
        if key.startswith(prefix):
            own_sums[key.removeprefix(prefix)] = value
    if not own_sums:
        return None
    try:
        value = float(figure(own_sums))
    except (Exception, SystemExit):  # Code of users may raise anything.
        return None
    return value if math.isfinite(value) else None


def _mean(value: float, weight: float) -> float | None:
    if not weight or not math.isfinite(value):
        return None
    return value / weight


def _exp(loss: float | None) -> float | None:
    """Return e to that power; None if it is too large for a float."""
    if loss is None or loss >= 709:
        return None
    return math.exp(loss)
