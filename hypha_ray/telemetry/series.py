"""A run's rounds as columns of numbers, which plots are drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from hypha_ray.figures import objective_of, task_figures
from hypha_ray.telemetry.charts import Chart
from hypha_ray.telemetry.sinks.files import Record, by_round

STEPS_BYTES = 64 << 20
"""Size of a file of metrics up to which the reports of workers are read for the norms of gradients."""
CURVES_OF_WORKERS = 8
"""Most workers that have a curve each in a chart."""


def kinds_to_read(path: Path) -> tuple[str, ...]:
    """Kinds of the records of a file of metrics that are read for plots; of a large file no reports of workers."""
    if path.exists() and path.stat().st_size > STEPS_BYTES:
        return ("round", "eval")
    return ("round", "eval", "step")


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
        round_seconds = [record.get("time_s") or 0.0 for record in self.rounds]
        self.seconds = list(accumulate(round_seconds))
        """Seconds of training up to the end of each round."""

    def column(self, name: str, scale: float = 1.0, otherwise: str = "") -> list[float]:
        """Return a field of every round, or another field where a round lacks it."""
        column = []
        for record in self.rounds:
            value = record.get(name, record.get(otherwise))
            column.append(math.nan if value is None else scale * float(value))
        return column

    def time_shares(self, kind: str) -> list[float]:
        """Return the percentage of the fleet's time that every round has spent on a use; NaN without it."""
        column: list[float] = []
        for record in self.rounds:
            shares = record.get("time_shares") or {}
            column.append(100 * shares.get(kind, math.nan))
        return column

    def total_after(self, totals: Sequence[float], number: int) -> float:
        """Return a running total after a round, 0 before the first: the amount of training of evaluated weights.

        `number` is that of a record, counted from 0.
        """
        latest = 0.0
        for round_number, total in zip(self.numbers, totals, strict=True):
            if round_number <= number + 1:
                latest = total
        return latest

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
