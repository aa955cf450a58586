"""Spans of a real run, as a collector receives them: each round is one tree over all processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clusters import single_node
from tests.support.jobs import Outcome, job_of, run_job
from tests.support.span_collector import CollectedSpan, SpanCollector, span_collector

ROUNDS = 3


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    """A collector, and a cluster of one node that exports to it."""
    with span_collector() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "600000")
        with single_node():
            yield collector


def trees(collector: SpanCollector, run: str) -> dict[int, list[CollectedSpan]]:
    """Spans of each round of a run, that of the round itself first."""
    spans = [span for span in collector.spans() if span.process["service.instance.id"] == run]
    roots = [span for span in spans if span.name == "round"]
    assert len({root.trace_id for root in roots}) == len(roots)
    trees = {int(root.attributes["hypha.round"]): [root] for root in roots}
    number_of_trace = {root.trace_id: int(root.attributes["hypha.round"]) for root in roots}
    for span in spans:
        if span.name != "round":
            trees[number_of_trace[span.trace_id]].append(span)
    return trees


def trained(collector: SpanCollector, runs: Path, corpus: Path, name: str, strategy: str) -> Outcome:
    sizes = {"update_rounds": ROUNDS, "samples_between_updates": 64}
    sinks = {"sinks": ["jsonl", "otel"]}
    job = job_of(name, corpus, rounds=sizes, sync={"strategy": strategy}, telemetry=sinks)
    return run_job(job, runs, corpus)


def test_spans_of_a_round_are_one_tree_over_five_processes(
    collector: SpanCollector, tmp_path: Path, corpus: Path
) -> None:
    run = trained(collector, tmp_path, corpus, "traced", "diloco")
    rounds = trees(collector, "traced")
    assert sorted(rounds) == list(range(ROUNDS))
    for number, (root, *parts) in rounds.items():
        assert root.parent_id == b""
        assert {part.parent_id for part in parts} == {root.span_id}
        assert all(root.began_ns <= part.began_ns <= part.ended_ns <= root.ended_ns for part in parts)
        processes = {str(part.process["hypha.process"]) for part in (root, *parts)}
        assert processes == {"scheduler", "worker-0", "worker-1", "server-0", "store"}
        assert len({part.process["process.pid"] for part in (root, *parts)}) == 5
        names = [part.name for part in parts]
        assert {name: names.count(name) for name in ("training", "encode", "evaluation", "commit")} == {
            "training": 2,
            "encode": 2,
            "evaluation": 2,
            "commit": 1,
        }
        assert names.count("merge") >= 2 and names.count("reduce") >= 1
        ways = [
            (part.attributes["hypha.direction"], part.attributes["hypha.worker"])
            for part in parts
            if part.name == "transfer"
        ]
        assert {("up", 0), ("up", 1), ("down", 0), ("down", 1)} <= set(ways)
        up = sum(int(part.attributes.get("hypha.bytes", 0)) for part in parts)
        assert up == run.of_kind("round")[number]["bytes_up"]


def test_spans_without_a_barrier_belong_to_rounds_too(collector: SpanCollector, tmp_path: Path, corpus: Path) -> None:
    trained(collector, tmp_path, corpus, "async", "async")
    rounds = trees(collector, "async")
    names = [part.name for parts in rounds.values() for part in parts]
    assert names.count("commit") == ROUNDS and names.count("training") >= 2 * ROUNDS
    for root, *parts in rounds.values():
        assert parts and {part.parent_id for part in parts} == {root.span_id}
        assert all(root.began_ns <= part.began_ns <= part.ended_ns <= root.ended_ns for part in parts)
