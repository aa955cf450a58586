"""A run's rounds as columns of numbers, the charts that are drawn of them, and the figures of a whole run.

`summary.json` has these figures in the end. Charts are drawn in plots and on the page of a run. The caption of a run's
pictures is its name, the date of its start, and its model.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hypha_ray.config.load import CONFIG
from hypha_ray.figures import Objective, objective_of, shown_beside, task_figures
from hypha_ray.fleet_time import FleetTime, training_seconds
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, Record, by_round, of_kind, read_json

Unit: TypeAlias = Literal["", "%", "s", "B", "1/s", "tokens"]
"""Unit of an axis: a plain number, a fraction shown as a percentage, seconds, bytes, a rate, or a count of tokens."""
GRADIENT_NORM = "Norm of the gradient before clipping"
"""Title of the chart of what workers report."""
CURVES_OF_WORKERS = 8
"""Most workers that have a curve each in a chart."""
WARM_UP_ROUNDS = 2
"""First rounds, in which the planner doesn't know the workers' speeds; left out of the mean idle fraction."""
RECORDED_BYTES = "recorded_bytes"
"""Field of summary.json with the sizes of the files that it was made of, by their names."""


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
    with suppress(OSError, ValueError):  # The file is missing or damaged.
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


class Series:
    """A run's rounds as columns of numbers, with NaN where a record has none."""

    def __init__(self, records: Sequence[Record], summary: Record) -> None:
        self.rounds = by_round(records, "round")
        evaluations = by_round(records, "eval")
        self.objective = objective_of(evaluations)
        self.tasks = {int(record["round"]): task_figures(record) for record in evaluations}
        """Figures of the task by round; most rounds may have none."""
        self.evaluations = [record for record in evaluations if record.get(self.objective.name) is not None]
        self.summary = summary
        self.steps = [record for record in records if record.get("kind") == "step"]
        """Reports of workers."""
        self.numbers = [int(record["round"]) + 1 for record in self.rounds]
        self.seconds = training_seconds(self.rounds)
        """Seconds of training up to the end of each round."""

    def column(self, name: str, scale: float = 1.0, otherwise: str = "") -> list[float]:
        """Return a field of every round, or another field where a round lacks it."""
        column = []
        for record in self.rounds:
            value = record.get(name, record.get(otherwise))
            column.append(math.nan if value is None else scale * float(value))
        return column

    def time_shares(self, use: str) -> list[float]:
        """Return the percentage of the fleet's time that every round has spent on a use; NaN without it."""
        column: list[float] = []
        for record in self.rounds:
            shares = record.get("time_shares") or {}
            column.append(100 * shares.get(use, math.nan))
        return column

    def total_after(self, totals: Sequence[float], round_number: int) -> float:
        """Return a running total after a round, 0 before the first: the amount of training of evaluated weights.

        `round_number` is that of a record, counted from 0.
        """
        latest_total = 0.0
        for record_number, total in zip(self.numbers, totals, strict=True):
            if record_number <= round_number + 1:
                latest_total = total
        return latest_total

    @property
    def workers(self) -> list[str]:
        """Workers of all rounds, in the order of their numbers."""
        names: set[str] = set()
        for record in self.rounds:
            names |= {str(worker) for worker in record.get("batches") or {}}
        return sorted(names, key=lambda name: (len(name), name))

    def batches(self, worker: str) -> list[int]:
        """Return a worker's batches in every round; 0 if it took no part."""
        counts = []
        for record in self.rounds:
            batches_by_worker = record.get("batches") or {}
            counts.append(int(batches_by_worker.get(worker, 0)))
        return counts

    def has(self, name: str) -> bool:
        """Whether any round has a field."""
        return any(record.get(name) is not None for record in self.rounds)

    def labels_of(self, chart: Chart) -> dict[str, str]:
        """Return the labels of a chart's curves that the run has figures of, by their fields."""
        if chart.needs is not None and not self.has(chart.needs):
            return {}
        return {name: label for name, label in chart.labels.items() if self.has(name)}


def every_step_bytes(series: Series) -> list[float]:
    """Bytes that workers would have sent by the end of each round, had they exchanged a gradient at every step.

    None are returned for a run whose summary lacks the size of a gradient.
    """
    gradient_bytes = series.summary.get("parameter_bytes")
    if not gradient_bytes:
        return []
    totals = []
    steps = 0
    for record in series.rounds:
        batches_by_worker = record.get("batches") or {}
        steps += sum(batches_by_worker.values())
        totals.append(gradient_bytes * steps)
    return totals


def running_totals(values: Sequence[float]) -> list[float]:
    """Running totals of values, of which NaN counts as 0."""
    return list(accumulate(0.0 if math.isnan(value) else value for value in values))


def gradient_norms(series: Series) -> dict[str, tuple[list[float], list[float]]]:
    """Return points of the gradients' norms of the first workers, by their labels.

    Returns:
        Progress in rounds, of which reports within a round have a part, and the norms before clipping.

    """
    points: dict[str, tuple[list[float], list[float]]] = {}
    for record in series.steps:
        norm = record.get("gradient_norm")
        if norm is None:
            continue
        progress, norms = points.setdefault(str(record["worker"]), ([], []))
        progress.append(int(record["round"]) + _part_of_round(record))
        norms.append(float(norm))
    workers = sorted(points, key=lambda name: (len(name), name))
    suffix = f" of {len(workers)}" if len(workers) > CURVES_OF_WORKERS else ""
    return {f"worker {worker}{suffix}": points[worker] for worker in workers[:CURVES_OF_WORKERS]}


def _part_of_round(report: Record) -> float:
    """Part of a round's samples that all workers had trained on at a report; 1 if that isn't known."""
    target = report.get("round_target")
    samples = report.get("round_samples")
    if not target or samples is None:
        return 1.0
    return min(1.0, float(samples) / float(target))


def summary(
    records: Iterable[Record], events: Iterable[Record] = (), parameter_bytes: int | None = None
) -> dict[str, Any]:
    """Summarize a run.

    Args:
        records: lines of metrics.jsonl, in order.
        events: lines of events.jsonl.
        parameter_bytes: size of a gradient, to compare the run's traffic with an exchange at every inner step.

    Returns:
        The fields of summary.json; None where a run has no such figure.

    """
    records = list(records)
    events = list(events)
    rounds = by_round(records, "round")
    evaluations = by_round(records, "eval")
    planned_rounds = [record for record in rounds if record["round"] >= WARM_UP_ROUNDS]
    plan_errors = _measured(rounds, "plan_error")
    costs = [event["cost"] for event in of_kind(events, "cost")]
    return {
        "rounds": len(rounds),
        "epochs": rounds[-1].get("epoch") if rounds else None,
        **_work(rounds),
        **_quality(rounds, evaluations),
        "ended_early": ended_early(events),
        **_fleet_time(rounds, events),
        "idle_fraction": _mean(_measured(planned_rounds, "idle_fraction")),
        "plan_error": _mean([abs(error) for error in plan_errors]),
        "peak_memory_bytes": _peak_memory(rounds),
        **_traffic(rounds, parameter_bytes),
        "rejected": int(_total(rounds, "rejected")),
        "workers_lost": len(of_kind(events, "loss")),
        "cost": sum(costs) if costs else None,
        "slices_quarantined": len({event["slice"] for event in of_kind(events, "quarantine")}),
    }


def recorded_bytes(directory: Path) -> dict[str, int]:
    """Sizes of the files that a summary is made of, by their names; a missing one has none."""
    paths = (directory / METRICS, directory / EVENTS)
    return {path.name: path.stat().st_size for path in paths if path.exists()}


def recorded_summary(directory: Path) -> Record | None:
    """Return summary.json; None without one, or if a later record shows that it is of an earlier attempt.

    Raises:
        OSError: a file can't be read.

    """
    figures = read_json(directory / SUMMARY)
    if figures.get(RECORDED_BYTES) != recorded_bytes(directory):
        return None
    return figures


def _fleet_time(rounds: list[Record], events: list[Record]) -> dict[str, Any]:
    """Goodput, and shares of the fleet's time; None for records of an earlier version, which lack it."""
    samples = 0
    for record in rounds:
        if record.get("fleet_s") is not None:
            samples += record["samples"]
    time = FleetTime.of_records([*rounds, *of_kind(events, "fleet_time")])
    fields = time.record(samples)
    return {"goodput": fields["goodput"], "time_shares": fields["time_shares"]}


def ended_early(events: Iterable[Record]) -> str | None:
    """Reason for which the last attempt ended before all rounds; None if it didn't."""
    starts_and_stops = of_kind(events, "attempt", "stop")
    return starts_and_stops[-1].get("reason") if starts_and_stops else None


def _work(rounds: list[Record]) -> dict[str, Any]:
    seconds = max(training_seconds(rounds), default=0.0)
    samples = _since(rounds, "samples_total", "samples")
    tokens = _since(rounds, "tokens_total", "tokens")
    return {
        "samples": int(samples or 0),
        "tokens": None if tokens is None else int(tokens),
        "seconds": seconds,
        "samples_per_s": _per_second(samples, seconds),
        "tokens_per_s": _per_second(tokens, seconds),
        "mfu": _utilisation(rounds),
    }


def _per_second(count: float | None, seconds: float) -> float | None:
    if count is None or not seconds:
        return None
    return count / seconds


def _utilisation(rounds: list[Record]) -> float | None:
    """Mean utilisation over the time of all rounds; None if one of them has none."""
    seconds = _total(rounds, "time_s")
    if not seconds or any(record.get("mfu") is None for record in rounds):
        return None
    return math.fsum(record["mfu"] * record["time_s"] for record in rounds) / seconds


def _peak_memory(rounds: Iterable[Record]) -> int | None:
    """Most memory of any worker in any round; None if none has reported it."""
    peaks: list[int] = []
    for record in rounds:
        peak_by_worker = record.get("peak_memory_bytes") or {}
        peaks += peak_by_worker.values()
    return max(peaks, default=None)


def _since(rounds: list[Record], total: str, per_round: str) -> float | None:
    """Sum that these rounds have added to a total of the run, without the rounds before them."""
    if not rounds or rounds[-1].get(total) is None:
        return None
    first_round = rounds[0]
    earlier_total = 0.0
    if first_round["round"]:
        earlier_total = (first_round.get(total) or 0) - (first_round.get(per_round) or 0)
    return float(rounds[-1][total] - max(0.0, earlier_total))


def _quality(rounds: list[Record], evaluations: list[Record]) -> dict[str, Any]:
    objective = objective_of(evaluations)
    measured_evaluations = [record for record in evaluations if record.get(objective.name) is not None]
    best = objective.best(measured_evaluations, key=lambda record: float(record[objective.name]), default=None)
    last_round: Record = rounds[-1] if rounds else {}
    last_evaluation: Record = measured_evaluations[-1] if measured_evaluations else {}
    return {
        "loss": last_round.get("loss"),
        **_evaluation(objective, last_evaluation, ""),
        **_evaluation(objective, best or {}, "best_"),
        "best_round": best and best["round"],
    }


def _evaluation(objective: Objective, record: Record, prefix: str) -> dict[str, Any]:
    names = [objective.name, *shown_beside(objective, record)]
    return {prefix + name: record.get(name) for name in names}


def _traffic(rounds: list[Record], parameter_bytes: int | None) -> dict[str, Any]:
    up_bytes = int(_total(rounds, "bytes_up"))
    steps = 0
    for record in rounds:
        batches_by_worker = record.get("batches") or {}
        steps += sum(batches_by_worker.values())
    every_step = None if parameter_bytes is None else steps * parameter_bytes
    ratio = None
    if every_step is not None and up_bytes:
        ratio = every_step / up_bytes
    return {
        "bytes_up": up_bytes,
        "bytes_down": int(_total(rounds, "bytes_down")),
        "inner_steps": steps,
        "every_step_bytes": every_step,
        "traffic_ratio": ratio,
    }


def _measured(records: Iterable[Record], name: str) -> list[float]:
    """Values of a field, of the records that have one."""
    values = [record.get(name) for record in records]
    return [value for value in values if value is not None]


def _total(records: Iterable[Record], name: str) -> float:
    return math.fsum(_measured(records, name))


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
