"""Inputs of sinks: their place, metrics with one name in several sinks, and curves of trackers."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks.files import Record, newest_records, plain

NONE_LEFT = {"hypha_worker_batches": 0.0}
"""Value of a gauge for a worker that isn't in the round any more; other gauges have no value then."""
_SIGNS_OF_LIFE = ("attempt", "commit")
TIME_SHARES = "time_shares"
"""Field with parts of the fleet's time by their use."""


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
class Labels:
    """Labels of a run: a remark, None without one, and tags."""

    notes: str | None
    tags: tuple[str, ...]

    @classmethod
    def of(cls, config: Record) -> Labels:
        """Labels in the configuration that a sink starts with; secrets of URLs are masked."""
        run = plain(config).get("run") or {}
        return cls(run.get("notes") or None, tuple(run.get("tags") or ()))


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge of `field` in records of `kind`; `unit` is in UCUM, the convention of OpenTelemetry.

    With a `tag` the field is a table of values, by worker or by whatever the tag tells.
    """

    name: str
    kind: str
    field: str
    unit: str
    description: str
    tag: str | None = None


METRICS = (
    Gauge("hypha_loss", "round", "loss", "1", "mean training loss of the round"),
    Gauge("hypha_val_loss", "eval", "val_loss", "1", "validation loss of the global weights"),
    Gauge("hypha_reward", "round", "reward", "1", "mean reward of the round's responses"),
    Gauge("hypha_val_reward", "eval", "reward", "1", "mean reward of the global weights' responses"),
    Gauge("hypha_accuracy", "eval", "accuracy", "1", "share of validation samples that are classified rightly"),
    Gauge("hypha_learning_rate", "round", "learning_rate", "1", "learning rate of the inner optimizer"),
    Gauge("hypha_samples_per_second", "round", "samples_per_s", "{sample}/s", "samples trained on, all workers"),
    Gauge("hypha_tokens_per_second", "round", "tokens_per_s", "{token}/s", "tokens trained on, all workers"),
    Gauge("hypha_scored_per_second", "round", "scored_per_s", "{position}/s", "positions scored, all workers"),
    Gauge("hypha_mfu", "round", "mfu", "1", "operations of training, of those that all workers' GPUs are made for"),
    Gauge("hypha_round", "round", "round", "1", "number of the last complete round"),
    Gauge("hypha_eta_seconds", "round", "eta_s", "s", "time left, if the other rounds take as long as these did"),
    Gauge("hypha_goodput", "round", "goodput", "1", "committed samples, of those that hired workers could have made"),
    Gauge("hypha_time_share", "round", "time_shares", "1", "part of the fleet's time, by its use", tag="kind"),
    Gauge("hypha_idle_fraction", "round", "idle_fraction", "1", "part of worker time from its delta to new weights"),
    Gauge("hypha_bytes_up", "round", "bytes_up", "By", "bytes from workers to servers in the round"),
    Gauge("hypha_bytes_down", "round", "bytes_down", "By", "bytes from servers to workers in the round"),
    Gauge("hypha_sync_seconds", "round", "sync_s", "s", "last delta ready to every worker merged"),
    Gauge("hypha_workers", "round", "workers", "{worker}", "workers in the round"),
    Gauge("hypha_worker_batch_seconds", "round", "batch_s", "s", "time of one batch on a worker", tag="worker"),
    Gauge(
        "hypha_worker_gradient_norm",
        "step",
        "gradient_norm",
        "1",
        "norm of a worker's last gradient, before clipping",
        tag="worker",
    ),
    Gauge("hypha_worker_mfu", "round", "mfu_by_worker", "1", "the same of a worker while it trains", tag="worker"),
    Gauge(
        "hypha_worker_peak_memory_bytes",
        "round",
        "peak_memory_bytes",
        "By",
        "most memory of tensors on a worker's GPU in the round",
        tag="worker",
    ),
    Gauge("hypha_worker_batches", "round", "batches", "{batch}", "batches of a worker in the round", tag="worker"),
)
COMMIT_AGE = Gauge("hypha_commit_age_seconds", "", "", "s", "time since the last commit, or since the attempt began")
"""Gauge of the clock, which no record has."""

KINDS = {metric.name: metric.kind for metric in METRICS}
TAGS = {metric.name: metric.tag for metric in (*METRICS, COMMIT_AGE)}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Value of a metric, for a worker or a kind if the metric has such a tag; NaN if it has no value any more."""

    metric: str
    value: float
    label: str | None = None
    """Worker, or whatever else the metric's tag tells; None without a tag."""

    def tags(self, run: str) -> dict[str, str]:
        """Tags that distinguish the values of a metric."""
        tags = {"run": run}
        tag = TAGS[self.metric]
        if tag is not None and self.label is not None:
            tags[tag] = self.label
        return tags


class Measures:
    """Extracts metrics from records; reports once when a metric has no value any more."""

    def __init__(self) -> None:
        self._known_metrics: set[tuple[str, str | None]] = set()

    def measure(self, record: Record) -> list[Measurement]:
        """Return a record's finite values, and NaN for metrics that the previous record had and this one hasn't."""
        kind = record.get("kind")
        reporter = str(record["worker"]) if kind == "step" else None
        measurements: list[Measurement] = []
        for metric in METRICS:
            if metric.kind == kind:
                field = record.get(metric.field)
                measurements += _finite_values(metric, field if reporter is None else {reporter: field})
        present_metrics = {(measurement.metric, measurement.label) for measurement in measurements}
        of_kind = {(name, label) for name, label in self._known_metrics if KINDS[name] == kind}
        if reporter is not None:  # A report says nothing of other workers.
            of_kind = {(name, label) for name, label in of_kind if label == reporter}
        self._known_metrics |= present_metrics
        return measurements + self._end(of_kind - present_metrics)

    def departure(self, event: Record) -> list[Measurement]:
        """Return NaN for metrics of a worker's reports, if the event tells that it is gone."""
        if event["kind"] not in ("loss", "leave", "exclude"):
            return []
        worker = str(event["worker"])
        return self._end(
            {(name, label) for name, label in self._known_metrics if KINDS[name] == "step" and label == worker}
        )

    def _end(self, ended_metrics: set[tuple[str, str | None]]) -> list[Measurement]:
        """Forget metrics, by name and label; return their last values."""
        self._known_metrics -= ended_metrics
        measurements: list[Measurement] = []
        for name, label in sorted(ended_metrics, key=lambda key: (key[0], key[1] or "")):
            measurements.append(Measurement(name, NONE_LEFT.get(name, math.nan), label))
        return measurements


class CommitClock:
    """Time since the last commit or, before the first one of an attempt, since the attempt began.

    Args:
        events: the events of the run so far, which an actor that takes another's place goes on from.

    """

    def __init__(self, events: Path) -> None:
        self._latest: datetime | None = None
        """Time of day of that event; None before the first one."""
        with suppress(OSError):
            for event in newest_records(events, _SIGNS_OF_LIFE).values():
                self.add_event(event)

    def add_event(self, event: Record) -> None:
        """Take an event; those of other kinds change nothing."""
        wall_time = event.get("wall_time")
        if event["kind"] in _SIGNS_OF_LIFE and isinstance(wall_time, str):
            time = datetime.fromisoformat(wall_time)
            self._latest = max(self._latest or time, time)

    def age_s(self) -> float | None:
        """Seconds since then, by the time of day; None before the first event."""
        if self._latest is None:
            return None
        return max(0.0, (datetime.now(UTC) - self._latest).total_seconds())


def _finite_values(metric: Gauge, field: object) -> Iterator[Measurement]:
    if isinstance(field, dict) and metric.tag is not None:
        for label, value in field.items():
            if value is not None and math.isfinite(value):
                yield Measurement(metric.name, float(value), str(label))
    elif isinstance(field, int | float) and metric.tag is None and math.isfinite(field):
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
    """Names and steps of curves, such as ``round/loss``, ``round/batches/worker-3`` and ``worker-3/loss``.

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
                for use, share in (record.get(TIME_SHARES) or {}).items():
                    fields[f"{TIME_SHARES}/{use}"] = share
                return Points(kind, "round", record["round"], numbers_of(kind, fields))
            case "step":
                worker_name = f"worker-{record['worker']}"
                step = self._reports[worker_name]
                self._reports[worker_name] += 1
                return Points(worker_name, f"{worker_name}/report", step, numbers_of(worker_name, record))
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
