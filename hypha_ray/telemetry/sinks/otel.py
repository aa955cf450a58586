"""OpenTelemetry over OTLP/HTTP, set up by the standard OTEL_* environment variables and nothing else."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from hypha_ray.telemetry.metrics import METRICS, Measures
from hypha_ray.telemetry.sinks.files import Record


class Exporter(OTLPMetricExporter):
    """The standard exporter, which also says when an export fails: the reader above it doesn't pass that on."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        super().__init__()
        self._on_failure = on_failure

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Export, and report a failure."""
        result = super().export(metrics_data, timeout_millis, **kwargs)
        if result is not MetricExportResult.SUCCESS:
            self._on_failure("no OTLP collector takes the metrics; see OTEL_EXPORTER_OTLP_ENDPOINT")
        return result


class OpenTelemetry:
    """A sink of OTLP gauges with a meter provider of its own; the process's global one stays as it is.

    Values are exported every OTEL_METRIC_EXPORT_INTERVAL milliseconds, and once more at the end.
    """

    def __init__(self, run: str, on_failure: Callable[[str], None]) -> None:
        self._run = run
        self._on_failure = on_failure
        self._measures = Measures()

    def start(self, config: Record) -> None:
        """Connect a provider to the collector."""
        # The exporter logs every failed export; ours are counted, and logged once.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        reader = PeriodicExportingMetricReader(Exporter(self._on_failure))
        self._provider = MeterProvider([reader], resource=_resource(self._run), shutdown_on_exit=False)
        meter = self._provider.get_meter("hypha_ray")
        self._gauges = {
            metric.name: meter.create_gauge(metric.name, unit=metric.unit, description=metric.description)
            for metric in METRICS
        }

    def record(self, record: Record) -> None:
        """Set the gauges that the record has values for; a value that isn't set again isn't exported again."""
        for measurement in self._measures.take(record):
            if math.isnan(measurement.value):
                continue
            self._gauges[measurement.metric].set(measurement.value, measurement.tags(self._run))

    def event(self, event: Record) -> None:
        """Events have no gauges."""

    def summary(self, figures: Record) -> None:
        """Figures of a whole run have no gauges."""

    def close(self) -> None:
        """Export for the last time and end the provider."""
        self._provider.shutdown()


def _resource(run: str) -> Resource:
    """Describe the run; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word."""
    ours = Resource({"service.name": "hypha_ray", "service.instance.id": run})
    return Resource.create(ours.merge(OTELResourceDetector().detect()).attributes)
