"""Tracer of a process: the SDK's batches and exporter, and ids of rounds on which all processes agree."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, set_span_in_context

from hypha_ray.traces import RoundKey

_PROBLEM = "no OTLP collector takes the spans; see OTEL_EXPORTER_OTLP_ENDPOINT; training goes on"


class RoundIds(NamedTuple):
    """Ids of a round's trace and of its own span."""

    trace_id: int
    span_id: int


def round_ids(cluster: str, run: str, key: RoundKey) -> RoundIds:
    """Compute the ids of a round; every process of the run gets the same."""
    text = f"{cluster}/{run}/{key.attempt}/{key.round}"
    digest = hashlib.sha256(text.encode()).digest()
    return RoundIds(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))


def resource_of(run: str, process: Mapping[str, int | str] | None = None) -> Resource:
    """Describe a run, or a `process` of it; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    defaults = Resource({"service.name": "hypha_ray", "service.instance.id": run, **(process or {})})
    merged = defaults.merge(OTELResourceDetector().detect())
    return Resource.create(merged.attributes)


class _RoundIdGenerator(RandomIdGenerator):
    """Random ids, except for the next span of a round."""

    def __init__(self) -> None:
        self.next_round: RoundIds | None = None
        """Ids of the span of a round that is about to start; None if another span is."""

    def generate_trace_id(self) -> int:
        """Return the id of the trace that is about to begin."""
        if self.next_round is None:
            return super().generate_trace_id()
        return self.next_round.trace_id

    def generate_span_id(self) -> int:
        """Return the id of the span that is about to start."""
        if self.next_round is None:
            return super().generate_span_id()
        span_id = self.next_round.span_id
        self.next_round = None
        return span_id


class _Exporter(OTLPSpanExporter):
    """The standard exporter, which remembers whether an export has failed."""

    has_failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export a batch; one that fails for longer than the exporter's time limit is lost."""
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.has_failed = True
        return result


class RoundTracer:
    """Tracer with a provider of its own; the process's global one stays as it is.

    A thread exports batches of a bounded queue, so a collector that hangs holds nothing up. Spans that no longer fit
    into the queue are lost.

    Args:
        run: name of the run.
        cluster: name of Ray's session and job, which no other run of this name shares.
        process: name of the actor.

    Raises:
        ValueError: a variable OTEL_* has a value that the SDK refuses.

    """

    def __init__(self, run: str, cluster: str, process: str) -> None:
        # The exporter logs every failed export; ours are told once.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._run = run
        self._cluster = cluster
        self._ids = _RoundIdGenerator()
        self._exporter = _Exporter()
        self._is_problem_told = False
        resource = resource_of(run, {"hypha.process": process, "process.pid": os.getpid()})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("hypha_ray")

    def start_round(self, key: RoundKey) -> Span:
        """Start the span of a round; its parts may be in other processes."""
        self._ids.next_round = round_ids(self._cluster, self._run, key)
        attributes: dict[str, int | str] = {
            "hypha.run": self._run,
            "hypha.attempt": key.attempt,
            "hypha.round": key.round,
        }
        return self._tracer.start_span("round", Context(), attributes=attributes)

    @contextmanager
    def part(self, name: str, key: RoundKey, attributes: Mapping[str, int | str]) -> Iterator[None]:
        """Record the block as a part of a round, also if it raises an error."""
        named = {f"hypha.{attribute}": value for attribute, value in attributes.items()}
        part = self._tracer.start_span(name, self._context_of(key), attributes={"hypha.round": key.round, **named})
        try:
            yield
        finally:
            part.end()

    def next_problem(self) -> str | None:
        """Line for the user if an export has failed, once."""
        if self._is_problem_told or not self._exporter.has_failed:
            return None
        self._is_problem_told = True
        return _PROBLEM

    def flush(self) -> None:
        """Export all that waits; a collector that hangs makes this take long."""
        self._provider.force_flush()

    def _context_of(self, key: RoundKey) -> Context:
        """Context with the span of a round, which is sampled here if it is sampled at the scheduler."""
        ids = round_ids(self._cluster, self._run, key)
        sampling = self._provider.sampler.should_sample(None, ids.trace_id, "round")
        is_sampled = sampling.decision is Decision.RECORD_AND_SAMPLE
        flags = TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT
        parent = SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(flags))
        return set_span_in_context(NonRecordingSpan(parent), Context())
