"""OpenTelemetry: what a collector at the other end of a socket receives."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from opentelemetry import metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult

from hypha_ray.telemetry.sinks.base import Tally, build
from hypha_ray.telemetry.sinks.files import read_jsonl
from hypha_ray.telemetry.sinks.inputs import METRICS as GAUGES
from hypha_ray.telemetry.sinks.otel import Exporter
from tests.support.fleet import fleet_records
from tests.support.http_servers import LocalServer, QuietHandler

ROUND = {"kind": "round", "round": 7, "loss": 2.5, "bytes_up": 4096, "workers": 2, "batches": {"0": 6, "1": 4}}


class Collector:
    """A collector that keeps the requests it gets."""

    def __init__(self, url: str, requests: list[tuple[str, ExportMetricsServiceRequest]]) -> None:
        self.url = url
        self.requests = requests
        self.refusals = 0
        """Number of requests that are refused from here on."""

    def values(self) -> dict[tuple[str, str | None], float]:
        """Return the last value of every metric, by worker or use of time."""
        return {
            (metric.name, label_of(point.attributes)): point.as_double
            for _, request in self.requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.gauge.data_points
        }


def attributes(pairs: object) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in pairs}  # type: ignore[attr-defined]


def label_of(pairs: object) -> str | None:
    """Worker or use of time that a value is of; None if it is of the whole run."""
    tags = attributes(pairs)
    return tags.get("worker", tags.get("kind"))


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    requests: list[tuple[str, ExportMetricsServiceRequest]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.body()
            refused = collector.refusals > 0
            if refused:
                collector.refusals -= 1
            else:
                requests.append((self.path, ExportMetricsServiceRequest.FromString(body)))
            self.answer(400 if refused else 200)

    with LocalServer(Handler) as server:
        collector = Collector(server.url, requests)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def report(directory: Path) -> dict[str, dict[str, int]]:
    sinks = build(directory, "run-1", ["otel"])
    sinks.start({})
    sinks.record(ROUND)
    sinks.record({"kind": "eval", "round": 7, "val_loss": 2.75})
    sinks.close()
    return sinks.losses()


def test_otel_round_and_evaluation_reach_the_collector(tmp_path: Path, collector: Collector) -> None:
    assert report(tmp_path)["otel"] == {"failed": 0, "dropped": 0}
    assert collector.requests[-1][0] == "/v1/metrics"
    assert collector.values() == {
        ("hypha_round", None): 7.0,
        ("hypha_loss", None): 2.5,
        ("hypha_val_loss", None): 2.75,
        ("hypha_bytes_up", None): 4096.0,
        ("hypha_workers", None): 2.0,
        ("hypha_worker_batches", "0"): 6.0,
        ("hypha_worker_batches", "1"): 4.0,
    }


def test_otel_gauges_have_the_last_numbers_of_the_metrics_file(tmp_path: Path, collector: Collector) -> None:
    sinks = build(tmp_path, "run-1", ["otel"], patience_s=60.0)
    sinks.start({})
    for record in fleet_records():
        norm = {"gradient_norm": 0.25 * (record["worker"] + 1)} if record["kind"] == "step" else {}
        sinks.record({**record, **norm})
    sinks.close()
    records = read_jsonl(tmp_path / "metrics.jsonl")
    last = {record["kind"]: record for record in records}
    reports = {str(record["worker"]): record for record in records if record["kind"] == "step"}
    expected: dict[tuple[str, str | None], float] = {}
    for gauge in GAUGES:
        if gauge.kind == "step":
            expected |= {(gauge.name, worker): record[gauge.field] for worker, record in reports.items()}
            continue
        value = last[gauge.kind].get(gauge.field, {})  # A fleet of CPUs has no utilisation.
        values = value.items() if isinstance(value, dict) else [(None, value)]
        expected |= {(gauge.name, worker): number for worker, number in values}
    assert len(reports) == 2
    absent = {
        "hypha_reward",
        "hypha_val_reward",
        "hypha_accuracy",
        "hypha_mfu",
        "hypha_worker_mfu",
        "hypha_worker_peak_memory_bytes",
    }
    assert collector.values() == expected and {name for name, _ in expected} == {one.name for one in GAUGES} - absent


def test_otel_has_the_age_of_the_last_commit_at_the_moment_of_an_export(tmp_path: Path, collector: Collector) -> None:
    """The file has an older commit: an actor that takes another's place goes on from it."""
    now = datetime.now(UTC)
    minutes_ago = [(now - timedelta(minutes=minutes)).isoformat() for minutes in (50, 40, 30)]
    older = [{"kind": "attempt", "wall_time": minutes_ago[0]}, {"kind": "commit", "wall_time": minutes_ago[1]}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in older))
    report(tmp_path)
    assert collector.values()["hypha_commit_age_seconds", None] == pytest.approx(40 * 60, abs=60)
    sinks = build(tmp_path, "run-1", ["otel"], patience_s=60.0)
    sinks.start({})
    sinks.event({"kind": "join", "worker": 0, "wall_time": now.isoformat()})
    sinks.event({"kind": "attempt", "wall_time": minutes_ago[2]})
    sinks.close()
    assert collector.values()["hypha_commit_age_seconds", None] == pytest.approx(30 * 60, abs=60)


def test_otel_export_names_run_and_service(tmp_path: Path, collector: Collector) -> None:
    report(tmp_path)
    resource = collector.requests[-1][1].resource_metrics[0]
    point = resource.scope_metrics[0].metrics[0].gauge.data_points[0]
    assert attributes(resource.resource.attributes)["service.name"] == "hypha_ray"
    assert attributes(point.attributes)["run"] == "run-1"


def test_otel_service_name_of_the_environment_wins(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-fleet")
    report(tmp_path)
    resource = collector.requests[-1][1].resource_metrics[0].resource
    assert attributes(resource.attributes)["service.name"] == "our-fleet"


def test_otel_leaves_the_global_provider_alone(tmp_path: Path, collector: Collector) -> None:
    before = metrics.get_meter_provider()
    report(tmp_path)
    assert metrics.get_meter_provider() is before


def test_otel_collector_that_comes_late_gets_what_it_has_missed(
    collector: Collector,
) -> None:
    tally = Tally("otel")
    exporter = Exporter(tally)
    reader = InMemoryMetricReader()
    gauge = MeterProvider([reader], shutdown_on_exit=False).get_meter("m").create_gauge("hypha_loss")
    exports = []
    for value in (3.0, 2.0, 1.0):
        gauge.set(value)
        exports.append(reader.get_metrics_data())
    collector.refusals = 2

    assert [exporter.export(one) for one in exports[:2]] == [MetricExportResult.FAILURE] * 2
    assert exporter.export(exports[2]) is MetricExportResult.SUCCESS

    values = [
        point.as_double
        for _, request in collector.requests
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.gauge.data_points
    ]
    assert values == [3.0, 2.0, 1.0]
    exporter.shutdown()
    assert tally.counts() == {"failed": 0, "dropped": 0}
