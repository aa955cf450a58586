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

import pytest

ROOT = Path(__file__).parents[2]
TALK = "import os, sys, time; print('temporary folder:', os.environ['RAY_TMPDIR'], flush=True); "


def demo(statement: str, **environment: str) -> subprocess.Popen[str]:
    """Start the script, with this interpreter as the job's python, and further variables."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "jobs/demo.sh", "python", "-c", TALK + statement]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PATH": path, **environment}, stdout=pipe, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


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


def test_demo_tells_the_run_once_though_its_job_tells_it_at_the_start_and_at_the_end() -> None:
    with demo("[print('run: /a/run') for _ in range(2)]", data="/a/dataset") as script:
        output, _ = script.communicate(timeout=240)
    assert script.returncode == 0, output
    assert output.splitlines()[-3:] == ["report: /a/run/report.html", "plots: /a/run/plots", "run: /a/run"]
    assert_nothing_is_left(output)


@pytest.mark.long
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


DYING_RAY = """#!{python}
import http.server, os, pathlib, signal, sys, threading

here = pathlib.Path(__file__).parent
if sys.argv[1] == "start":
    port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--dashboard-port="))
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    (here / "pid").write_text(str(os.getpid()))
    def end(*_):
        print("Traceback (most recent call last):\\n  a frame\\nRuntimeError: Timed out waiting for node info.")
        sys.exit(1)
    signal.signal(signal.SIGTERM, end)
    signal.pause()
elif sys.argv[1] == "job":
    os.kill(int((here / "pid").read_text()), signal.SIGTERM)
    sys.exit("Traceback (most recent call last): of the submission")
"""
"""A `ray` whose head ends while a job is being submitted."""


def test_demo_whose_ray_ends_says_so_in_a_line_and_can_be_tried_again(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text(DYING_RAY.replace("{python}", sys.executable))
    ray.chmod(0o755)
    copy = tmp_path / "checkout"  # The script puts the environment of its checkout before all others.
    (copy / "jobs").mkdir(parents=True)
    (copy / "hypha_ray").mkdir()
    (copy / "jobs" / "demo.sh").write_text((ROOT / "jobs" / "demo.sh").read_text())
    environment = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = subprocess.run(
        ["bash", copy / "jobs" / "demo.sh", "true"],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert script.returncode == 75, script.stderr
    told, *last_words = script.stderr.splitlines()
    assert told.startswith("error[NET002]: Ray ended before the job did. Fix: try again")
    assert last_words == ["RuntimeError: Timed out waiting for node info."]
