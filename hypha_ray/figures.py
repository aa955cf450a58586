"""Figures of an evaluation: one rule, by which a run and `jobs/evaluate.py` report the same, and the one to go by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from hypha_ray.types import Sums


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


LOSS = Objective("val_loss", "loss", "val_loss", min, ("perplexity", "accuracy"))
OBJECTIVES = (Objective("reward", "reward", "val_reward", max, ("pass@1",)), LOSS)
"""Objectives of all tasks: a run's is the first that its evaluations have."""

METRIC = "metric/"
"""Beginning of the names of a job's own metrics."""
_TASK_FIGURE = re.compile(rf"accuracy|pass@\d+|{METRIC}.+")
Figure: TypeAlias = Callable[[Mapping[str, float]], float]
"""Figure by its sums."""


def task_figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Figures by name that tell how well a task is done: accuracy, metrics of the job, or shares of solved prompts."""
    present = {name: value for name, value in evaluation.items() if value is not None}
    return {name: float(value) for name, value in present.items() if _TASK_FIGURE.fullmatch(name)}


def objective_of(records: Iterable[Mapping[str, Any]]) -> Objective:
    """Objective of a run by its evaluations; the loss if there are none."""
    records = list(records)
    known = (one for one in OBJECTIVES if any(record.get(one.name) is not None for record in records))
    return next(known, LOSS)


def metric_figure(name: str) -> str:
    """Name of the figure of one of the job's own metrics; of a metric ``module:object`` it has the object's name."""
    return f"{METRIC}{name.rpartition(':')[2]}"


def shown_beside(objective: Objective, record: Mapping[str, Any]) -> list[str]:
    """Names of further figures of an evaluation that are shown with the objective, as far as it has them."""
    named = [name for name in objective.beside if name in record]
    return [*named, *(name for name in record if name.startswith(METRIC))]


def figures_of(sums: Sums, perplexity: bool, metrics: Mapping[str, Figure] | None = None) -> dict[str, float | None]:
    """Mean of each figure, and the perplexity of a loss unless there is an accuracy.

    Args:
        sums: figures of an evaluation.
        perplexity: the loss is the cross entropy of tokens, in nats.
        metrics: the job's own metrics, by the names of their figures; None: there are none.

    Returns:
        Figures by name; None for one that isn't finite, and for one without weight.

    """
    found = {name: _mean(value, weight) for name, (value, weight) in sums.items() if not name.startswith(METRIC)}
    if perplexity and "val_loss" in found and "accuracy" not in found:
        found["perplexity"] = _exp(found["val_loss"])
    return found | {name: _metric(name, figure, sums) for name, figure in (metrics or {}).items()}


def _metric(name: str, figure: Figure, sums: Sums) -> float | None:
    """Return a metric by its sums; None for one that can't be told, which its own code may say by an exception."""
    own = {key.removeprefix(f"{name}/"): value for key, (value, _) in sums.items() if key.startswith(f"{name}/")}
    if not own:
        return None
    try:
        value = float(figure(own))
    except Exception:  # Code of users may raise anything.
        return None
    return value if math.isfinite(value) else None


def _mean(value: float, weight: float) -> float | None:
    return value / weight if weight and math.isfinite(value) else None


def _exp(loss: float | None) -> float | None:
    """Return e to that power, or None where it is too large for a float."""
    return math.exp(loss) if loss is not None and loss < 709 else None
