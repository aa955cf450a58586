"""Spans of several processes: what a collector at the other end of a socket makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace

from hypha_ray import traces
from hypha_ray.traces import RoundKey
from hypha_ray.traces.tracer import RoundTracer
from tests.support.span_collector import SpanCollector, span_collector

KEY = RoundKey(1, 7)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanCollector]:
    with span_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setattr(traces, "_tracer", None)
        yield collector


def actor(name: str, job: str = "01000000") -> Any:
    """Ray's context of an actor."""
    return lambda: SimpleNamespace(
        get_session_name=lambda: "session_1", get_job_id=lambda: job, get_actor_name=lambda: name
    )


def traces_of(run: str, job: str = "01000000") -> None:
    """Begin in a process of a run, record a part of a round, and export it."""
    traces.begin(["otel"], run, actor("worker-0", job))
    with traces.traced("training", KEY):
        pass
    traces.flush()


def test_parts_of_other_processes_belong_to_the_span_of_their_round(collector: SpanCollector) -> None:
    tracers = [RoundTracer("run", "session", name) for name in ("scheduler", "worker-0", "worker-1")]
    whole = tracers[0].start_round(KEY)
    for number, tracer in enumerate(tracers[1:]):
        with tracer.part("training", KEY, {"worker": number}):
            pass
    whole.end()
    for tracer in tracers:
        tracer.flush()
    spans = {(span.name, span.attributes.get("hypha.worker")): span for span in collector.spans()}
    root = spans["round", None]
    assert root.parent_id == b"" and root.attributes["hypha.round"] == 7 and root.attributes["hypha.run"] == "run"
    for number in (0, 1):
        part = spans["training", number]
        assert (part.trace_id, part.parent_id) == (root.trace_id, root.span_id)
        assert part.process["hypha.process"] == f"worker-{number}"
        assert root.began_ns <= part.began_ns <= part.ended_ns <= root.ended_ns
    assert len({span.span_id for span in spans.values()}) == 3


def test_traces_of_rounds_attempts_runs_and_ray_jobs_differ(collector: SpanCollector) -> None:
    tracers = [RoundTracer("run", "session/1", "a"), RoundTracer("run", "session/2", "a"), RoundTracer("b", "c", "d")]
    for tracer in tracers:
        for key in (RoundKey(1, 7), RoundKey(1, 8), RoundKey(2, 7)):
            tracer.start_round(key).end()
        tracer.flush()
    spans = collector.spans()
    assert len({span.trace_id for span in spans}) == len({span.span_id for span in spans}) == 9


def test_part_that_raises_an_error_is_recorded_and_the_error_goes_on(collector: SpanCollector) -> None:
    traces.begin(["otel"], "run", actor("store"))
    with pytest.raises(ZeroDivisionError), traces.traced("commit", KEY):
        raise ZeroDivisionError
    traces.flush()
    assert [span.name for span in collector.spans()] == ["commit"]


def test_without_the_sink_there_are_no_spans(collector: SpanCollector) -> None:
    traces.begin(["console", "jsonl"], "run", actor("worker-0"))
    with traces.traced("training", KEY):
        pass
    traces.flush()
    assert traces.start_round(KEY) is None and traces.next_problem() is None
    assert collector.spans() == []


@pytest.mark.parametrize(("name", "value"), [("OTEL_SDK_DISABLED", "True"), ("OTEL_TRACES_EXPORTER", "none")])
def test_variables_turn_spans_off(
    collector: SpanCollector, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    traces_of("run")
    assert collector.spans() == []


def test_endpoint_of_traces_wins(collector: SpanCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "our-fleet")
    traces_of("run")
    [span] = collector.spans()
    assert span.process["service.name"] == "our-fleet" and span.process["service.instance.id"] == "run"


def test_sampler_keeps_or_drops_a_round_with_all_its_parts(
    collector: SpanCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    scheduler = RoundTracer("run", "session", "scheduler")
    worker = RoundTracer("run", "session", "worker-0")
    for number in range(40):
        whole = scheduler.start_round(RoundKey(1, number))
        with worker.part("training", RoundKey(1, number), {}):
            pass
        whole.end()
    scheduler.flush()
    worker.flush()
    rounds = [span.trace_id for span in collector.spans() if span.name == "round"]
    parts = [span.trace_id for span in collector.spans() if span.name == "training"]
    assert rounds == parts and 5 < len(rounds) < 35


def test_setting_that_the_sdk_refuses_turns_spans_off(
    collector: SpanCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    traces_of("run")
    assert collector.spans() == [] and "there are no spans" in caplog.text


def test_collector_that_hangs_holds_nothing_up_and_costs_no_memory(
    collector: SpanCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    collector.answers.clear()
    traces.begin(["otel"], "run", actor("worker-0"))
    for _ in range(500):
        with traces.traced("training", KEY):
            pass
    traces.flush()
    collector.answers.set()
    traces.flush()
    assert len(collector.spans()) <= 64 + 2 * 16


def test_collector_that_refuses_is_one_line_for_the_user(
    collector: SpanCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    traces_of("run")
    traces_of_problems = [traces.next_problem(), traces.next_problem()]
    assert traces_of_problems[0] is not None and "OTEL_EXPORTER_OTLP_ENDPOINT" in traces_of_problems[0]
    assert traces_of_problems[1] is None


def test_global_provider_is_left_alone(collector: SpanCollector) -> None:
    before = trace.get_tracer_provider()
    traces_of("run")
    assert trace.get_tracer_provider() is before and len(collector.spans()) == 1
