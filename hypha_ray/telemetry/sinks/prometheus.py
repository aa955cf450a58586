"""Ray's own metrics: gauges on the metrics export port of the node, where Prometheus and the dashboard find them."""

from __future__ import annotations

import threading

from ray.util.metrics import Gauge

from hypha_ray.telemetry.sinks.files import EVENTS, Record
from hypha_ray.telemetry.sinks.inputs import COMMIT_AGE, METRICS, CommitClock, Measurement, Measures, SinkPlace

AGE_S = 5.0
"""Seconds between two values of the time since the last commit."""


class Prometheus:
    """A sink of gauges; Ray puts ``ray_`` before their names, so `hypha_loss` is scraped as `ray_hypha_loss`.

    A gauge vanishes with its process, so the sink belongs in an actor that lives as long as the run.
    """

    def __init__(self, sink_place: SinkPlace) -> None:
        self._run = sink_place.run
        self._events = sink_place.directory / EVENTS
        self._measures = Measures()
        self._closing = threading.Event()
        self._gauges: dict[str, Gauge] = {}

    def start(self, config: Record) -> None:
        """Register the gauges."""
        self._clock = CommitClock(self._events)
        for metric in (*METRICS, COMMIT_AGE):
            tags = ("run",) if metric.tag is None else ("run", metric.tag)
            self._gauges[metric.name] = Gauge(metric.name, description=metric.description, tag_keys=tags)
        threading.Thread(target=self._show_age, name="telemetry-commit-age", daemon=True).start()

    def record(self, record: Record) -> None:
        """Set the gauges that the record has values for; NaN makes a gauge vanish."""
        for measurement in self._measures.measure(record):
            self._set(measurement)

    def event(self, event: Record) -> None:
        """Notice commits, and workers that are gone."""
        self._clock.add_event(event)
        for measurement in self._measures.departure(event):
            self._set(measurement)

    def summary(self, figures: Record) -> None:
        """Figures of a whole run have no gauges."""

    def close(self) -> None:
        """End the thread of the clock; the gauges go with the process."""
        self._closing.set()

    def _show_age(self) -> None:
        while not self._closing.wait(AGE_S):
            age_s = self._clock.age_s()
            if age_s is not None:
                self._set(Measurement(COMMIT_AGE.name, age_s))

    def _set(self, measurement: Measurement) -> None:
        self._gauges[measurement.metric].set(measurement.value, tags=measurement.tags(self._run))
