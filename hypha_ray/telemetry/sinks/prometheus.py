"""Ray's own metrics: gauges on the metrics export port of the node, where Prometheus and the dashboard find them."""

from __future__ import annotations

from ray.util.metrics import Gauge

from hypha_ray.telemetry.sinks.files import Record
from hypha_ray.telemetry.sinks.inputs import METRICS, Measures, SinkPlace


class Prometheus:
    """A sink of gauges; Ray puts ``ray_`` before their names, so `hypha_loss` is scraped as `ray_hypha_loss`.

    A gauge vanishes with its process, so the sink belongs in an actor that lives as long as the run.
    """

    def __init__(self, sink_place: SinkPlace) -> None:
        self._run = sink_place.run
        self._measures = Measures()
        self._gauges: dict[str, Gauge] = {}

    def start(self, config: Record) -> None:
        """Register the gauges."""
        for metric in METRICS:
            tags = ("run",) if metric.tag is None else ("run", metric.tag)
            self._gauges[metric.name] = Gauge(metric.name, description=metric.description, tag_keys=tags)

    def record(self, record: Record) -> None:
        """Set the gauges that the record has values for; NaN makes a gauge vanish."""
        for measurement in self._measures.measure(record):
            self._gauges[measurement.metric].set(measurement.value, tags=measurement.tags(self._run))

    def event(self, event: Record) -> None:
        """Events have no gauges."""

    def summary(self, figures: Record) -> None:
        """Figures of a whole run have no gauges."""

    def close(self) -> None:
        """Nothing to do: the gauges go with the process."""
