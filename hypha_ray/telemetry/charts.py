"""Charts of figures over rounds, with their fields and units: the same for plots and for the page of a run.

The caption of a run's pictures is its name, the date of its start, and its model.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hypha_ray.config.load import CONFIG
from hypha_ray.telemetry.sinks.files import Record

Unit: TypeAlias = Literal["", "%", "s", "B", "1/s", "tokens"]
"""Unit of an axis: a plain number, a fraction shown as a percentage, seconds, bytes, a rate, or a count of tokens."""
GRADIENT_NORM = "Norm of the gradient before clipping"
"""Title of the chart of what workers report."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over rounds that share a unit."""

    title: str
    unit: Unit
    labels: Mapping[str, str]
    """Labels of the curves, by the fields of a round's record."""
    needs: str | None = None
    """Field without which the chart isn't shown; None: it is shown with any of its curves."""


OPTIMIZATION = (
    Chart("Learning rate", "", {"learning_rate": "of the inner optimizer"}),
    Chart("Step of the global weights", "", {"update_norm": "L2 norm of their change"}),
)
POLICY = (
    Chart("Entropy of the policy", "", {"entropy": "entropy"}),
    Chart("Divergence from the reference", "", {"kl": "divergence"}),
    Chart("Length of responses", "tokens", {"response_tokens": "mean"}),
    Chart(
        "Shares of groups, responses and tokens",
        "%",
        {
            "equal_groups": "groups with equal rewards",
            "truncated": "responses that were cut off",
            "clip_share": "tokens that were clipped",
            "value_clip_share": "tokens whose value was clipped",
            "by_generators": "prompts that generators have responded to",
        },
    ),
    Chart("Loss of the critic", "", {"value_loss": "half the squared error"}),
)
"""Figures of reinforcement learning."""
SPEED = (
    Chart(
        "Samples a second, all workers", "1/s", {"samples_per_s": "samples", "train_samples_per_s": "while they train"}
    ),
    Chart(
        "Tokens a second, all workers",
        "1/s",
        {"tokens_per_s": "tokens", "scored_per_s": "of them scored", "train_tokens_per_s": "while they train"},
        needs="tokens_per_s",
    ),
    Chart("Utilisation of GPUs", "%", {"mfu": "of the dense peak of 16 bits"}),
)
WAITING = (
    Chart(
        "Part of worker time spent waiting",
        "%",
        {"idle_fraction": "for new weights", "data_wait_fraction": "for data"},
    ),
    Chart("From the last delta to the last worker's new weights", "s", {"sync_s": "exchange"}),
    Chart("Staleness of deltas", "", {"staleness_mean": "mean", "staleness_max": "largest", "staleness": "steps"}),
)
PLAN = (
    Chart(
        "From the start of a round to its last delta",
        "s",
        {"finish_s": "actual", "predicted_s": "as planned"},
    ),
    Chart("Relative error of the plan", "%", {"plan_error": "error"}),
)
TRAFFIC = (
    Chart("Bytes in each round", "B", {"bytes_up": "up: deltas", "bytes_down": "down: weights"}),
    Chart("What encoding has cost", "", {"codec_error": "lost norm ÷ norm", "codec_cosine": "cosine"}),
)
FLEET = (
    Chart("Workers in the round", "", {"workers": "workers", "rejected": "deltas that were rejected"}),
    Chart("Goodput", "%", {"goodput": "goodput"}),
)
ALL_CHARTS = (*OPTIMIZATION, *POLICY, *SPEED, *WAITING, *PLAN, *TRAFFIC, *FLEET)


def caption_of(folder: Path, first_record: Record) -> str:
    """Return name, date and model of a run, as far as they are known.

    Args:
        folder: directory of the run.
        first_record: a record with the time at which the run began, about.

    """
    parts = [folder.resolve().name]
    date = date_of(first_record)
    if date is not None:
        parts.append(date)
    with suppress(OSError, ValueError):  # It is missing or damaged.
        tables = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        parts.append(model_name(tables))
    return ", ".join(parts)


def date_of(record: Record) -> str | None:
    """Return the day of a record, such as 28 November 2026, in UTC; None if the record doesn't tell it."""
    with suppress(ValueError):
        time = datetime.fromisoformat(str(record.get("wall_time")))
        return f"{time.day} {time:%B %Y}"
    return None


def model_name(tables: Mapping[str, Any]) -> str:
    """Return the name of a job's model: its repository, its factory, or its type."""
    table = tables.get("model", {})
    for key in ("repository", "factory"):
        name = table.get(key)
        if name not in (None, "none"):
            return str(name)
    config = table.get("config") or {}
    model_type = config.get("model_type", "a model")
    return f"{model_type} from random weights"
