"""OpenTelemetry over OTLP/HTTP, set up only by the standard OTEL_* environment variables."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader

from hypha_ray.telemetry.sinks.files import EVENTS, Record
from hypha_ray.telemetry.sinks.inputs import COMMIT_AGE, METRICS, CommitClock, ExportLosses, Measures, SinkPlace
from hypha_ray.traces.tracer import resource_of

_CAPACITY = 1024
"""Most exports that wait for a collector: 17 hours of one a minute."""
_REASON = "no OTLP collector takes the metrics; see OTEL_EXPORTER_OTLP_ENDPOINT"


class Exporter(OTLPMetricExporter):
    """The standard exporter, with a bounded queue: exports that failed are tried again with the next export.

    Args:
        losses: counts of exports that don't reach the collector.

    """

    def __init__(self, losses: ExportLosses) -> None:
        super().__init__()
        self._losses = losses
        self._waiting: deque[MetricsData] = deque()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Export all that wait, the oldest first, until an export fails."""
        had_failed = bool(self._waiting)
        self._waiting.append(metrics_data)
        while self._waiting:
            if super().export(self._waiting[0], timeout_millis, **kwargs) is not MetricExportResult.SUCCESS:
                self._report_failure(had_failed)
                return MetricExportResult.FAILURE
            self._waiting.popleft()
        if had_failed:
            self._losses.began()
        return MetricExportResult.SUCCESS

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """End; exports that still wait are lost."""
        if self._waiting:
            self._losses.fail(_REASON)
            self._losses.drop(len(self._waiting) - 1)
            self._waiting.clear()
        super().shutdown(timeout_millis, **kwargs)

    def _report_failure(self, had_failed: bool) -> None:
        if not had_failed:
            self._losses.wait(_REASON, _CAPACITY)
        if len(self._waiting) > _CAPACITY:
            self._waiting.popleft()
            self._losses.drop()


class OpenTelemetry:
    """A sink of OTLP gauges with a meter provider of its own; the process's global one stays as it is.

    Values are exported every OTEL_METRIC_EXPORT_INTERVAL milliseconds, and once more at the end.
    """

    def __init__(self, sink_place: SinkPlace) -> None:
        self._run = sink_place.run
        self._events = sink_place.directory / EVENTS
        self._losses = sink_place.losses
        self._measures = Measures()

    def start(self, config: Record) -> None:
        """Connect a provider to the collector."""
        # The exporter logs every failed export; ours are logged once.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        reader = PeriodicExportingMetricReader(Exporter(self._losses))
        self._provider = MeterProvider([reader], resource=resource_of(self._run), shutdown_on_exit=False)
        meter = self._provider.get_meter("hypha_ray")
        self._gauges = {
            metric.name: meter.create_gauge(metric.name, unit=metric.unit, description=metric.description)
            for metric in METRICS
        }
        self._clock = CommitClock(self._events)
        age = COMMIT_AGE
        meter.create_observable_gauge(age.name, [self._observe_age], unit=age.unit, description=age.description)

    def record(self, record: Record) -> None:
        """Set the gauges that the record has values for; a value that isn't set again isn't exported again."""
        for measurement in self._measures.measure(record):
            if math.isnan(measurement.value):
                continue
            self._gauges[measurement.metric].set(measurement.value, measurement.tags(self._run))

    def event(self, event: Record) -> None:
        """Notice commits."""
        self._clock.add_event(event)

    def summary(self, figures: Record) -> None:
        """Figures of a whole run have no gauges."""

    def close(self) -> None:
        """Export for the last time and end the provider."""
        self._provider.shutdown()

    def _observe_age(self, options: CallbackOptions) -> Iterable[Observation]:
        """Time since the last commit at the moment of an export."""
        age_s = self._clock.age_s()
        return [] if age_s is None else [Observation(age_s, {"run": self._run})]
