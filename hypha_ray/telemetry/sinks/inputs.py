"""Inputs of sinks: their place, metrics with one name in several sinks, and curves of trackers."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks.files import Record, plain


class ExportLosses(Protocol):
    """Counts of exports that don't reach a destination."""

    def wait(self, reason: object, capacity: int) -> None:
        """Report that the destination can't be reached yet, and how many exports may wait for it."""

    def began(self) -> None:
        """Report that the destination can be reached now."""

    def fail(self, reason: object) -> None:
        """Count an export that failed for good."""

    def drop(self, calls: int = 1) -> None:
        """Count exports that couldn't wait any longer."""


@dataclass(frozen=True, slots=True)
class SinkPlace:
    """Place of a sink, which its class is called with."""

    run: str
    """Name of the run."""
    directory: Path
    """The run directory."""
    losses: ExportLosses
    """Counts of losses, for a sink with a queue of its own."""
    trackers: Path | None = None
    """Folder that trackers share for all runs; None: the run directory."""
    aim_repository: str | None = None
    """Folder of Aim's repository; None: that of the trackers."""

    @property
    def folder(self) -> Path:
        """Folder for a tracker's files."""
        return self.trackers or self.directory


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge of `field` in records of `kind`; `unit` is in UCUM, the convention of OpenTelemetry."""

    name: str
    kind: str
    field: str
    unit: str
    description: str
    per_worker: bool = False


METRICS = (
    Gauge("hypha_loss", "round", "loss", "1", "mean training loss of the round"),
    Gauge("hypha_val_loss", "eval", "val_loss", "1", "validation loss of the global weights"),
    Gauge("hypha_samples_per_second", "round", "samples_per_s", "{sample}/s", "samples trained on, all workers"),
    Gauge("hypha_tokens_per_second", "round", "tokens_per_s", "{token}/s", "tokens trained on, all workers"),
    Gauge("hypha_scored_per_second", "round", "scored_per_s", "{position}/s", "positions scored, all workers"),
    Gauge("hypha_mfu", "round", "mfu", "1", "operations of training, of those that all workers' GPUs are made for"),
    Gauge("hypha_round", "round", "round", "1", "number of the last complete round"),
    Gauge("hypha_idle_fraction", "round", "idle_fraction", "1", "part of worker time spent at the barrier"),
    Gauge("hypha_bytes_up", "round", "bytes_up", "By", "bytes from workers to servers in the round"),
    Gauge("hypha_bytes_down", "round", "bytes_down", "By", "bytes from servers to workers in the round"),
    Gauge("hypha_sync_seconds", "round", "sync_s", "s", "last delta ready to every worker merged"),
    Gauge("hypha_workers", "round", "workers", "{worker}", "workers in the round"),
    Gauge("hypha_worker_batch_seconds", "round", "batch_s", "s", "time of one batch on a worker", per_worker=True),
    Gauge("hypha_worker_mfu", "round", "mfu_by_worker", "1", "the same of a worker while it trains", per_worker=True),
    Gauge(
        "hypha_worker_peak_memory_bytes",
        "round",
        "peak_memory_bytes",
        "By",
        "most memory of tensors on a worker's GPU in the round",
        per_worker=True,
    ),
    Gauge("hypha_worker_batches", "round", "batches", "{batch}", "batches of a worker in the round", per_worker=True),
)


KINDS = {metric.name: metric.kind for metric in METRICS}
NONE_LEFT = {"hypha_worker_batches": 0.0}
"""Value of a gauge for a worker that isn't in the round any more; other gauges have no value then."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Value of a metric, for a worker if the metric is per worker; NaN if it has no value any more."""

    metric: str
    value: float
    worker: str | None = None

    def tags(self, run: str) -> dict[str, str]:
        """Tags that distinguish the values of a metric."""
        return {"run": run} if self.worker is None else {"run": run, "worker": self.worker}


class Measures:
    """Extracts metrics from records; reports once when a metric has no value any more."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str | None]] = set()

    def measure(self, record: Record) -> list[Measurement]:
        """Return a record's finite values, and NaN for metrics that the previous record had and this one hasn't."""
        kind = record.get("kind")
        measurements: list[Measurement] = []
        for metric in METRICS:
            if metric.kind == kind:
                measurements += _finite_values(metric, record.get(metric.field))
        present = {(measurement.metric, measurement.worker) for measurement in measurements}
        of_kind = {(name, worker) for name, worker in self._known if KINDS[name] == kind}
        ended = of_kind - present
        self._known = (self._known | present) - ended
        for name, worker in sorted(ended, key=lambda key: (key[0], key[1] or "")):
            measurements.append(Measurement(name, NONE_LEFT.get(name, math.nan), worker))
        return measurements


def _finite_values(metric: Gauge, field: object) -> Iterator[Measurement]:
    if isinstance(field, dict) and metric.per_worker:
        for worker, value in field.items():
            if value is not None and math.isfinite(value):
                yield Measurement(metric.name, float(value), str(worker))
    elif isinstance(field, int | float) and not metric.per_worker and math.isfinite(field):
        yield Measurement(metric.name, float(field))


def check_installed(tracker: str, packages: Iterable[str]) -> None:
    """Refuse a tracker whose packages aren't installed.

    Raises:
        ConfigError: CFG022.

    """
    if not all(map(importlib.util.find_spec, packages)):
        problem = f"telemetry.sinks has {tracker}, which isn't installed"
        raise ConfigError("CFG022", problem, fix=f"pip install {tracker}, or leave it out of telemetry.sinks")


class Points(NamedTuple):
    """One point on each of several curves, all at the same step."""

    group: str
    axis: str
    """Name of the steps."""
    step: int
    values: dict[str, int | float]
    """Values by name of the curve."""


class Curves:
    """Names and steps of curves: ``round/loss``, ``round/batches/worker-3``, ``eval/val_loss`` and ``worker-3/loss``.

    Steps of rounds and evaluations are round numbers, those of workers count reports of this attempt.
    """

    def __init__(self) -> None:
        self._reports: Counter[str] = Counter()
        """Number of reports so far, by worker."""

    def points(self, record: Record) -> Points | None:
        """Return every number of a record; None if its kind has no curves."""
        match record.get("kind"):
            case "round" | "eval" as kind:
                fields = dict(record)
                for name in ("batches", "batch_s"):
                    by_worker = record.get(name) or {}
                    for worker, value in by_worker.items():
                        fields[f"{name}/worker-{worker}"] = value
                return Points(kind, "round", record["round"], numbers_of(kind, fields))
            case "step":
                worker = f"worker-{record['worker']}"
                step = self._reports[worker]
                self._reports[worker] += 1
                return Points(worker, f"{worker}/report", step, numbers_of(worker, record))
            case _:
                return None


def numbers_of(group: str, record: Record) -> dict[str, int | float]:
    """Return the finite numbers of a record, with a group before their names; `round` and `worker` are left out."""
    numbers: dict[str, int | float] = {}
    for name, value in plain(record).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in ("round", "worker"):
            numbers[f"{group}/{name}"] = value
    return numbers
