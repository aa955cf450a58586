"""Cost of telemetry: runs with all sinks beside one that writes its files alone, in turns; a collector hangs in some.

The job is `jobs/configs/tiny.toml`. Values are ratios of medians of samples a second, rounds of the start left out.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.start import HERE, prepared, run_command
from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl

ROWS = ("all_sinks", "hanging_collector")
"""Speed with all sinks, and with all sinks and a collector that hangs ÷ that with the run's files alone."""
TURNS = 3
"""Runs of each kind."""
ROUNDS = 24
_FIRST_ROUNDS = 4
"""Rounds of the start, which are left out."""
_EXTRAS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "sqlalchemy": "mlflow", "alembic": "mlflow"}
"""Extra of hypha_ray by the modules that it has."""
_SINKS = ("prometheus", "otel", "aim", "tensorboard", "mlflow")
"""All sinks but W&B and trackio, which start processes of their own, whose CPU would count here."""


def sinks() -> dict[str, dict[str, Any]]:
    """Measure all `ROWS`.

    Raises:
        ConfigError: CFG022, a sink's package isn't installed.

    """
    missing_extras = sorted({extra for module, extra in _EXTRAS.items() if find_spec(module) is None})
    if missing_extras:
        fix = f"pip install -e '.[{','.join(missing_extras)}]'"
        raise ConfigError("CFG022", "these rows need sinks that aren't installed", ", ".join(missing_extras), fix=fix)
    # Aim has no wheels for later Pythons.
    every = [sink for sink in _SINKS if sink != "aim" or find_spec("aim") is not None]
    kinds = {"files": (["jsonl"], False), ROWS[0]: (["jsonl", *every], False), ROWS[1]: (["jsonl", *every], True)}
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepared(Path(folder))
        for turn in range(TURNS):
            for kind, (names, hangs) in kinds.items():
                with _collector(hangs) as url:
                    speeds[kind].append(_speed(dataset, Path(folder, "runs", f"{kind}-{turn}"), names, url))
    base = statistics.median(speeds["files"])
    table: dict[str, dict[str, Any]] = {}
    for row in ROWS:
        ratio = statistics.median(speeds[row]) / base
        table[row] = {
            "value": ratio,
            "target": ">= 0.98",
            "turns": TURNS,
            "sinks": "+".join(every),
            "samples_per_s": base,
        }
    return table


def _speed(dataset: Path, run: Path, names: list[str], url: str) -> float:
    """Samples a second of a run with these sinks."""
    words = ["@", "jobs/configs/tiny.toml", "--dataset.path", str(dataset), "--rounds.update_rounds", str(ROUNDS)]
    words += ["--run.dir", str(run.parent), "--run.name", run.name, "--telemetry.plots", "false"]
    command = [sys.executable, "jobs/diloco.py", *words, "--telemetry.sinks", ",".join(names)]
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRIC_EXPORT_INTERVAL": "1000", "PYTHONPATH": str(HERE)}
    environment = {**os.environ, **variables, "RAY_ADDRESS": ""}
    run_command(command, environment)
    records = read_jsonl(run / METRICS, ["round"])[_FIRST_ROUNDS:]
    seconds = sum(float(record["time_s"]) for record in records)
    return sum(int(record["samples"]) for record in records) / seconds


@contextmanager
def _collector(hangs: bool) -> Iterator[str]:
    """Address of a collector, which answers or `hangs`."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Take an export."""
            self.rfile.read(int(self.headers["Content-Length"]))
            if hangs:
                is_over.wait()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
