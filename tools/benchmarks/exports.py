"""Processor time of exports to a collector: `python -m benchmarks.exports METRICS` feeds a sink and five tracers.

The collector is that of OTEL_EXPORTER_OTLP_ENDPOINT. A round begins every five seconds, with nine spans a process.
Prints the seconds of a processor that this process has used from the first round to the last one's end.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from hypha_ray.telemetry.sinks.files import read_jsonl
from hypha_ray.telemetry.sinks.inputs import SinkPlace
from hypha_ray.telemetry.sinks.otel import OpenTelemetry
from hypha_ray.traces import RoundKey
from hypha_ray.traces.tracer import RoundTracer

ROUNDS = 12
ROUND_S = 5.0
PROCESSES = 5
PARTS = 8


class _NoLosses:
    """Counts of losses, which are left uncounted."""

    def wait(self, reason: object, capacity: int) -> None:
        """Leave it uncounted."""

    def began(self) -> None:
        """Leave it uncounted."""

    def fail(self, reason: object) -> None:
        """Leave it uncounted."""

    def drop(self, calls: int = 1) -> None:
        """Leave it uncounted."""


def main() -> None:
    """Export, print, and end without waiting for the collector."""
    records = read_jsonl(Path(sys.argv[1]), ["round"])[:ROUNDS]
    with tempfile.TemporaryDirectory() as folder:
        sink = OpenTelemetry(SinkPlace("run", Path(folder), _NoLosses()))
        sink.start({})
        tracers = [RoundTracer("run", "cluster", f"process {number}") for number in range(PROCESSES)]
        began = time.process_time()
        for number, record in enumerate(records):
            sink.record(record)
            for tracer in tracers:
                _trace(tracer, RoundKey(0, number))
            time.sleep(ROUND_S)
        print(time.process_time() - began, flush=True)
    os._exit(0)


def _trace(tracer: RoundTracer, key: RoundKey) -> None:
    """Spans of one process in a round."""
    whole = tracer.start_round(key)
    for number in range(PARTS):
        with tracer.part("inner training", key, {"number": number}):
            pass
    whole.end()


if __name__ == "__main__":
    main()
