"""Cost of telemetry: all sinks beside the run's files alone, and a collector that hangs beside one that answers.

The job is `jobs/configs/tiny.toml`. Values are ratios of samples a second, rounds of the start left out. Single runs
differ by up to 7 %, so a collector hangs and answers in turns within one run, whose rounds are compared. They differ
by more than a collector can cost, so the processor time of exports is compared as well.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from contextlib import suppress
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from benchmarks.start import HERE, prepared, run_command
from hypha_ray.errors import ConfigError
from hypha_ray.telemetry.sinks.files import METRICS, read_jsonl

ROWS = ("all_sinks", "hanging_collector", "hanging_collector_cpu")
"""Speed with all sinks ÷ that with the run's files alone; speed while a collector hangs ÷ that while it answers;
processor time of exports to one that hangs ÷ that of exports to one that answers."""
TURNS = 3
"""Runs of each kind."""
ROUNDS = 24
LONG_ROUNDS = 120
"""Rounds of the run whose collector answers and hangs."""
PHASE_S = 20.0
"""Seconds in which a collector answers or hangs: some rounds, and longer than an export may last."""
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
    kinds = {"files": ["jsonl"], ROWS[0]: ["jsonl", *every]}
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        dataset, runs = prepared(Path(folder)), Path(folder, "runs")
        for turn in range(TURNS):
            for kind, names in kinds.items():
                with _Collector() as collector:
                    records = _rounds(dataset, runs / f"{kind}-{turn}", names, collector.url, ROUNDS)
                speeds[kind].append(_speed(records))
        with _Collector(PHASE_S) as collector:
            records = _rounds(dataset, runs / "hanging", kinds[ROWS[0]], collector.url, LONG_ROUNDS)
        answered_s, hung_s = (_export_cpu_s(runs / "hanging" / METRICS, hangs) for hangs in (False, True))
    base = statistics.median(speeds["files"])
    conditions = {"target": ">= 0.98", "sinks": "+".join(every)}
    answered, hung = (collector.rounds_within(records, hanging) for hanging in (False, True))
    return {
        ROWS[0]: {
            "value": statistics.median(speeds[ROWS[0]]) / base,
            "turns": TURNS,
            "samples_per_s": base,
            **conditions,
        },
        ROWS[1]: {
            "value": _speed(hung) / _speed(answered),
            "rounds": len(hung),
            "rounds_beside": len(answered),
            "samples_per_s": _speed(answered),
            **conditions,
        },
        ROWS[2]: {"value": hung_s / answered_s, "target": "<= 1", "seconds": hung_s, "seconds_beside": answered_s},
    }


def _rounds(dataset: Path, run: Path, names: list[str], url: str, rounds: int) -> list[dict[str, Any]]:
    """Train with these sinks; return the records of all rounds but the first."""
    words = ["@", "jobs/configs/tiny.toml", "--dataset.path", str(dataset), "--rounds.update_rounds", str(rounds)]
    words += ["--run.dir", str(run.parent), "--run.name", run.name, "--telemetry.plots", "false"]
    command = [sys.executable, "jobs/diloco.py", *words, "--telemetry.sinks", ",".join(names)]
    run_command(command, {**_environment(url), "PYTHONPATH": str(HERE), "RAY_ADDRESS": ""})
    return read_jsonl(run / METRICS, ["round"])[_FIRST_ROUNDS:]


def _environment(url: str) -> dict[str, str]:
    """Variables of a process that exports to this collector every second."""
    return {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRIC_EXPORT_INTERVAL": "1000"}


def _export_cpu_s(records: Path, hangs: bool) -> float:
    """Processor time in seconds of a minute's exports of these records, to a collector that answers or `hangs`."""
    with _Collector() as collector:
        if hangs:
            collector.hang()
        environment = {**_environment(collector.url), "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "tools")])}
        command = [sys.executable, "-m", "benchmarks.exports", str(records)]
        return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def _speed(records: list[dict[str, Any]]) -> float:
    """Samples a second of these rounds."""
    seconds = sum(float(record["time_s"]) for record in records)
    return sum(int(record["samples"]) for record in records) / seconds


class _Collector:
    """A collector that answers; with `phase_s`, it answers and hangs in turns, for so many seconds each."""

    def __init__(self, phase_s: float | None = None) -> None:
        self._phase_s = phase_s
        self._answers = threading.Event()
        self._answers.set()
        self._is_over = threading.Event()
        self._phase_starts = [time.time()]
        """Moments at which phases began."""
        answers = self._answers

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Take an export."""
                self.rfile.read(int(self.headers["Content-Length"]))
                answers.wait()
                with suppress(OSError):  # The exporter has given up.
                    self.send_response(200)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._threads = [threading.Thread(target=self._server.serve_forever), threading.Thread(target=self._take_turns)]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def hang(self) -> None:
        """Hang until the end."""
        self._answers.clear()

    def _take_turns(self) -> None:
        while not self._is_over.wait(self._phase_s):
            if self._answers.is_set():
                self._answers.clear()
            else:
                self._answers.set()
            self._phase_starts.append(time.time())

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._answers.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()

    def rounds_within(self, records: list[dict[str, Any]], hanging: bool) -> list[dict[str, Any]]:
        """Rounds that began and ended in one phase of hanging, or of answering."""
        within = []
        for record in records:
            end = datetime.fromisoformat(record["wall_time"]).timestamp()
            first, last = (bisect(self._phase_starts, moment) for moment in (end - float(record["time_s"]), end))
            if first == last and (first % 2 == 0) == hanging:
                within.append(record)
        return within
