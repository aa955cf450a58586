"""An OTLP collector of spans at the other end of a socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_servers import LocalServer, QuietHandler


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it has come over the wire, with the attributes of its process."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Id of the span that it belongs to; empty: of none."""
    began_ns: int
    ended_ns: int
    attributes: dict[str, int | str]
    process: dict[str, int | str]


class SpanCollector:
    """Keeps the spans of all requests; while it `hangs` it reads them and answers none."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self.answers = threading.Event()
        """Set while requests are answered."""
        self.answers.set()

    def spans(self) -> list[CollectedSpan]:
        """All spans in the order in which they came."""
        spans = []
        for path, request in self.requests:
            assert path == "/v1/traces"
            for resource in request.resource_spans:
                process = values_of(resource.resource.attributes)
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        ids = span.trace_id, span.span_id, span.parent_span_id
                        times = span.start_time_unix_nano, span.end_time_unix_nano
                        spans.append(CollectedSpan(span.name, *ids, *times, values_of(span.attributes), process))
        return spans


def values_of(attributes: object) -> dict[str, int | str]:
    """Attributes by name."""
    values = {}
    for pair in attributes:  # type: ignore[attr-defined]
        values[pair.key] = getattr(pair.value, pair.value.WhichOneof("value"))
    return values


@contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """A collector on a port of this machine. Requests for other signals are answered and forgotten."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.body()
            if self.path == "/v1/traces":
                collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
            collector.answers.wait()
            self.answer(200)

    with LocalServer(Handler) as server:
        collector = SpanCollector(server.url)
        try:
            yield collector
        finally:
            collector.answers.set()
