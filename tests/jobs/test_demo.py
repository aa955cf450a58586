"""jobs/demo.sh: a Ray head of its own, a submitted job, and nothing left behind, whichever way it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TALK = "import os, sys, time; print('temporary folder:', os.environ['RAY_TMPDIR'], flush=True); "


def demo(statement: str) -> subprocess.Popen[str]:
    """Start the script, with this interpreter as the job's python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "jobs/demo.sh", "python", "-c", TALK + statement]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def relatives(folder: str) -> Iterator[int]:
    """Processes that were started below the script: they have its folder in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"RAY_TMPDIR={folder}\0".encode() in (process / "environ").read_bytes():
                yield int(process.name)
        except OSError:
            continue


def assert_nothing_is_left(output: str) -> None:
    folder = re.findall(r"temporary folder: (\S+)", output)[0]
    deadline = time.monotonic() + 30
    while left := list(relatives(folder)):
        assert time.monotonic() < deadline, left
    assert not Path(folder).exists()


def test_demo_keeps_the_jobs_exit_status_and_leaves_nothing() -> None:
    with demo("sys.exit(75)") as script:
        output, _ = script.communicate(timeout=240)
    assert script.returncode == 75, output
    assert "dashboard: http://127.0.0.1:" in output
    assert_nothing_is_left(output)


def test_demo_terminated_in_the_middle_ends_job_and_cluster() -> None:
    with demo("time.sleep(1000)") as script:
        assert script.stdout is not None
        seen = ""
        while "temporary folder: " not in seen:
            line = script.stdout.readline()
            assert line, seen
            seen += line
        script.send_signal(signal.SIGTERM)
        rest, _ = script.communicate(timeout=120)
    assert script.returncode == 143, seen + rest
    assert_nothing_is_left(seen)
