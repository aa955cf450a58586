"""Seconds from a command to its first line, to its first worker and to its end, by a job of two short rounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.size import Size

JOBS = Path(__file__).resolve().parents[2]
LONGEST_S = 300


def start(size: Size) -> dict[str, dict[str, Any]]:
    """Seconds until the first worker has joined."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        _run("prepare.py", "--source", "stdlib", "--seq-len", "128", "--max-samples", "500", "--out", str(data))
        rounds = ["--rounds.update_rounds", "2", "--rounds.samples_between_updates", "64"]
        rounds += ["--inner_optimizer.warmup_steps", "1"]
        lease = ["--resources.num_workers", "1", "--resources.worker.gpu", "1" if size.device == "cuda" else "0"]
        run = ["--run.dir", scratch, "--run.name", "start", "--dataset.path", str(data)]
        began = time.time()
        first_s = _run("diloco.py", "@", str(JOBS / "configs" / "tiny.toml"), *rounds, *lease, *run)
        ended = time.time()
        events = [json.loads(line) for line in (Path(scratch) / "start" / "events.jsonl").read_text().splitlines()]
    joined = min(datetime.fromisoformat(event["wall_time"]).timestamp() for event in events if event["kind"] == "join")
    whole = {"first_line_s": round(first_s, 2), "whole_job_s": round(ended - began, 2)}
    return {"gpu_start": {"value": joined - began, "target": "", **whole}}


def _run(script: str, *arguments: str) -> float:
    """Run a job; return the seconds until its first line.

    Raises:
        RuntimeError: it fails.

    """
    command, began_s = [sys.executable, str(JOBS / script), *arguments], time.perf_counter()
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        first_s = time.perf_counter() - began_s
        lines += process.stdout.readlines()
        code = process.wait(LONGEST_S)
    if code:
        raise RuntimeError(f"{script} ended with {code}: {''.join(lines[-3:])}")
    return first_s
