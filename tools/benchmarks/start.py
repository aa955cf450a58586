"""Start and end of a command: of this checkout, and of another one in turns with it.

The job is `jobs/configs/tiny.toml` with two rounds. Ratios are of medians. The machine should have nothing else to do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import IO, Any

HERE = Path(__file__).parents[2]
STARTS = 5
"""Starts of each checkout."""
ROWS = ("start_first_line", "start_first_worker", "start_end")
"""From the command to its first line, and to the first worker that has joined; from ``done:`` to the last line."""
Line = tuple[float, str]
"""Monotonic time of a line, and the line."""


def start(beside: Path | None = None) -> dict[str, dict[str, Any]]:
    """Measure all `ROWS`; with another checkout, the values are ratios to it."""
    checkouts = [HERE, *([] if beside is None else [beside.absolute()])]
    times: dict[Path, list[Sequence[float]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        dataset = prepared(Path(folder))
        for number in range(STARTS):
            for checkout in checkouts if number % 2 == 0 else checkouts[::-1]:
                times[checkout].append(measure_start(checkout, dataset, Path(folder) / "runs"))
    here = _medians(times[HERE])
    there = None if beside is None else _medians(times[checkouts[-1]])
    return rows(here, there)


def rows(here: Sequence[float], there: Sequence[float] | None) -> dict[str, dict[str, Any]]:
    """Rows of the table from medians in seconds, in the order of `ROWS`; ratios if there is another checkout."""
    targets = ("<= 1 s", "<= 0.5 of b05301e", "<= 1 s beside the export")
    table: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(ROWS):
        row: dict[str, Any] = {"value": here[number], "target": targets[number], "unit": "s", "starts": STARTS}
        if there is not None:
            row |= {"value": here[number] / there[number], "unit": "ratio", "here_s": round(here[number], 2)}
            row["beside_s"] = round(there[number], 2)
        table[name] = row
    return table


def times_of(began_s: float, lines: Iterable[Line], events: Iterable[Mapping[str, Any]]) -> Sequence[float]:
    """Seconds of one start, in the order of `ROWS`.

    Args:
        began_s: monotonic time at which the command was given.
        lines: all lines of both of its streams.
        events: its run's events.

    """
    ordered = sorted(lines)
    first_s = ordered[0][0]
    joined_s = min(event["monotonic_s"] for event in events if event["kind"] == "join")
    done_s = next(at_s for at_s, text in ordered if text.startswith("done: "))
    last_s = [at_s for at_s, text in ordered if text.startswith("run: ")][-1]
    return first_s - began_s, joined_s - began_s, last_s - done_s


def _medians(times: Sequence[Sequence[float]]) -> Sequence[float]:
    return [statistics.median(column) for column in zip(*times, strict=True)]


def prepared(folder: Path) -> Path:
    """Prepare the dataset that is trained on, in a folder."""
    words = ("--source", "stdlib", "--tokenizer", "byte", "--seq-len", "128", "--max-samples", "4000")
    command = [sys.executable, "jobs/prepare.py", *words, "--out", str(folder / "data")]
    run_command(command, _environment(HERE))
    return folder / "data"


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command in this checkout.

    Raises:
        RuntimeError: it failed; with the last line of its error output.

    """
    result = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it wrote no error"]
        raise RuntimeError(f"{command[1]} ended with exit code {result.returncode}: {lines[-1]}")


def measure_start(checkout: Path, dataset: Path, runs: Path, *options: str) -> Sequence[float]:
    """Run the job in a checkout once, with further options; return seconds in the order of `ROWS`.

    Raises:
        RuntimeError: the job failed.

    """
    run = runs / f"{checkout.name}-{time.monotonic_ns()}"
    words = ("@", "jobs/configs/tiny.toml", "--rounds.update_rounds", "2", "--dataset.path", str(dataset))
    command = [sys.executable, "jobs/diloco.py", *words, "--run.dir", str(runs), "--run.name", run.name, *options]
    lines: list[Line] = []
    began_s = time.monotonic()
    with subprocess.Popen(
        command, cwd=checkout, env=_environment(checkout), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        readers = [Thread(target=_read, args=(stream, lines)) for stream in (job.stdout, job.stderr)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    if job.returncode:
        raise RuntimeError(f"{checkout}: exit code {job.returncode}: {lines[-1:]}")
    events = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return times_of(began_s, lines, map(json.loads, events))


def _read(stream: IO[str], lines: list[Line]) -> None:
    lines.extend((time.monotonic(), line) for line in stream)


def _environment(checkout: Path) -> dict[str, str]:
    """Variables with which a checkout's own package is found, and a Ray of its own started."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return {**variables, "PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1"}
