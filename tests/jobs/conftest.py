"""Jobs as a user runs them, in processes of their own, and a look at what they leave behind."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
"""Longest wait for processes that are about to end, on the busiest machine."""


def started_with(folder: Path) -> list[int]:
    """Processes that have this folder as RAY_TMPDIR in their environment: a job, its Ray, and that one's workers."""
    mark, found = f"RAY_TMPDIR={folder}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or someone else's
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def left_behind(folder: Path) -> list[str]:
    """Command lines of those of them that don't end by themselves."""
    for pid in started_with(folder):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], PATIENCE_S)
            os.close(descriptor)
    lines = []
    for pid in started_with(folder):
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return lines


class Jobs:
    """Runs job scripts from the repository's root. Every run is checked to leave no process behind.

    Args:
        home: what they get as HYPHA_RAY_HOME.
        folder: what they get as RAY_TMPDIR; short, since Ray puts sockets there.

    """

    def __init__(self, home: Path, folder: Path) -> None:
        self.home, self._folder = home, folder

    def __call__(
        self, *arguments: str | Path, script: str = "diloco", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, script=script, env=env)
        output, errors = process.communicate(timeout=240)
        assert left_behind(self._folder) == []
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(
        self, *arguments: str | Path, script: str = "diloco", env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Run a script, and leave it to the caller to wait for it."""
        own = {"HYPHA_RAY_HOME": str(self.home), "RAY_TMPDIR": str(self._folder)}
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return subprocess.Popen(
            [sys.executable, f"jobs/{script}.py", *map(str, arguments)],
            cwd=ROOT,
            env=inherited | own | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self) -> list[int]:
        """All that they have started, and that still runs."""
        return started_with(self._folder)


@contextmanager
def jobs_in(home: Path) -> Iterator[Jobs]:
    """`Jobs` for a while; what still runs at the end is killed."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield Jobs(home, folder)
    for pid in started_with(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run_job(tmp_path: Path) -> Iterator[Jobs]:
    """`run_job(*arguments, script="diloco", env={})` runs a job script; `run_job.home` is where its runs go."""
    with jobs_in(tmp_path / "home") as jobs:
        yield jobs


@pytest.fixture(scope="module")
def run_shared_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The same for runs that several tests look at."""
    with jobs_in(tmp_path_factory.mktemp("home")) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of a running cluster: one node with four logical CPUs and no GPU."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    command = [*ray, "start", "--head", "--block", "--temp-dir", str(folder), "--port=0", "--include-dashboard=false"]
    command += ["--num-cpus=4", "--num-gpus=0", "--object-store-memory=300000000"]
    command += [f"--{name}={free_port()}" for name in ("ray-client-server-port", "dashboard-agent-listen-port")]
    environment = os.environ | {"RAY_TMPDIR": str(folder), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout.readline, "")
            yield next(found[1] for line in lines if (found := re.search(r"--address='([^']+)'", line)))
        finally:
            process.terminate()
    assert left_behind(folder) == []
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="session")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file: a language model of 33 000 parameters, three rounds of a moment each, two workers."""
    file = tmp_path_factory.mktemp("files") / "small.toml"
    file.write_text(SMALL)
    return file


SMALL = """
[model.config]
model_type = "llama"
vocab_size = 384
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = true
bos_token_id = 1
eos_token_id = 1
pad_token_id = 0

[rounds]
update_rounds = 3
samples_between_updates = 64
max_batch_size = 4

[inner_optimizer]
learning_rate = 3e-3

[resources]
num_workers = 2
"""
