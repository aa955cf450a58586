"""Custom metrics made of records' fields, with the same names in Prometheus and OpenTelemetry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hypha_ray.telemetry.sinks.files import Record


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge of `field` in records of `kind`; `unit` is in UCUM, the convention of OpenTelemetry."""

    name: str
    kind: str
    field: str
    unit: str
    description: str
    per_worker: bool = False


METRICS = (
    Metric("hypha_loss", "round", "loss", "1", "mean training loss of the round"),
    Metric("hypha_val_loss", "eval", "val_loss", "1", "validation loss of the global weights"),
    Metric("hypha_samples_per_second", "round", "samples_per_s", "{sample}/s", "samples trained on, all workers"),
    Metric("hypha_tokens_per_second", "round", "tokens_per_s", "{token}/s", "tokens trained on, all workers"),
    Metric("hypha_scored_per_second", "round", "scored_per_s", "{position}/s", "positions scored, all workers"),
    Metric("hypha_mfu", "round", "mfu", "1", "operations of training, of those that all workers' GPUs are made for"),
    Metric("hypha_round", "round", "round", "1", "number of the last complete round"),
    Metric("hypha_idle_fraction", "round", "idle_fraction", "1", "part of worker time spent at the barrier"),
    Metric("hypha_bytes_up", "round", "bytes_up", "By", "bytes from workers to servers in the round"),
    Metric("hypha_bytes_down", "round", "bytes_down", "By", "bytes from servers to workers in the round"),
    Metric("hypha_sync_seconds", "round", "sync_s", "s", "last delta ready to every worker merged"),
    Metric("hypha_workers", "round", "workers", "{worker}", "workers in the round"),
    Metric("hypha_worker_batch_seconds", "round", "batch_s", "s", "time of one batch on a worker", per_worker=True),
    Metric("hypha_worker_mfu", "round", "mfu_by_worker", "1", "the same of a worker while it trains", per_worker=True),
    Metric(
        "hypha_worker_peak_memory_bytes",
        "round",
        "peak_memory_bytes",
        "By",
        "most memory of tensors on a worker's GPU in the round",
        per_worker=True,
    ),
    Metric("hypha_worker_batches", "round", "batches", "{batch}", "batches of a worker in the round", per_worker=True),
)


KINDS = {metric.name: metric.kind for metric in METRICS}
NONE_LEFT = {"hypha_worker_batches": 0.0}
"""Value of a gauge for a worker that is not in the round any more; the others have no value then."""


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
    """Extracts metrics from records; remembers those that had a value, to report when they have none."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str | None]] = set()

    def take(self, record: Record) -> list[Measurement]:
        """Return a record's finite values, and NaN for metrics that the previous record had and this one hasn't."""
        kind = record.get("kind")
        found = [
            measurement
            for metric in METRICS
            if metric.kind == kind
            for measurement in _values(metric, record.get(metric.field))
            if math.isfinite(measurement.value)
        ]
        known = {(one.metric, one.worker) for one in found}
        gone = {key for key in self._known if KINDS[key[0]] == kind} - known
        self._known = (self._known | known) - gone
        ended = sorted(gone, key=lambda key: (key[0], key[1] or ""))
        return found + [Measurement(name, NONE_LEFT.get(name, math.nan), worker) for name, worker in ended]


def _values(metric: Metric, field: object) -> Iterator[Measurement]:
    if isinstance(field, dict) and metric.per_worker:
        values = {str(worker): value for worker, value in field.items() if value is not None}
        yield from (Measurement(metric.name, float(value), worker) for worker, value in values.items())
    elif isinstance(field, int | float) and not metric.per_worker:
        yield Measurement(metric.name, float(field))
