"""Figures of an evaluation: one rule, by which a run and `jobs/evaluate.py` report the same, and the one to go by."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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

_TASK_FIGURE = re.compile(r"accuracy|pass@\d+")


def task_figures(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """Figures by name that tell how well a task is done: the accuracy, or the shares of solved prompts."""
    present = {name: value for name, value in evaluation.items() if value is not None}
    return {name: float(value) for name, value in present.items() if _TASK_FIGURE.fullmatch(name)}


def objective_of(records: Iterable[Mapping[str, Any]]) -> Objective:
    """Objective of a run by its evaluations; the loss if there are none."""
    records = list(records)
    known = (one for one in OBJECTIVES if any(record.get(one.name) is not None for record in records))
    return next(known, LOSS)


def figures_of(sums: Sums, perplexity: bool) -> dict[str, float | None]:
    """Mean of each figure, and the perplexity of a loss unless there is an accuracy.

    Args:
        sums: figures of an evaluation.
        perplexity: the loss is the cross entropy of tokens, in nats.

    Returns:
        Figures by name; None for one that isn't finite, and for one without weight.

    """
    found = {name: _mean(value, weight) for name, (value, weight) in sums.items()}
    if perplexity and "val_loss" in found and "accuracy" not in found:
        found["perplexity"] = _exp(found["val_loss"])
    return found


def _mean(value: float, weight: float) -> float | None:
    return value / weight if weight and math.isfinite(value) else None


def _exp(loss: float | None) -> float | None:
    """Return e to that power, or None where it is too large for a float."""
    return math.exp(loss) if loss is not None and loss < 709 else None
