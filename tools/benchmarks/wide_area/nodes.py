"""Real Ray nodes at the sites of a network: a head without CPUs at the first, a node with one CPU at every other.

Parameter servers are kept on the head: it alone has memory that can be reserved (`SERVER_ON_HEAD`). So every delta goes
up over its worker's link and down the head's, and new weights go the other way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.wide_area.links import DEVICE, Link, Network, Site
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.driver.credentials import make_token

JOBS = Path(__file__).parents[3] / "jobs"
"""Folder of the job scripts."""
STORE_BYTES = 300_000_000
"""Object store of each node."""
START_S = 90.0
END_S = 15.0
"""Longest waits for a node to start, and for it to end."""
SERVER_ON_HEAD = ("--resources.parameter_server.memory_gb", "0.2")
"""Flags of a job whose servers are to be on the head."""
_PORT = 6379
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": DEVICE,
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster.

    Args:
        sites: of the head, and of the nodes.
        folder: for Ray's files, and for others that go with the cluster.

    """

    sites: tuple[Site, ...]
    folder: Path

    @property
    def address(self) -> str:
        """Address of the cluster, as RAY_ADDRESS at any of the sites."""
        return f"{self.sites[0].address}:{_PORT}"

    def run(self, command: Sequence[str | Path], timeout_s: float, env: Mapping[str, str] | None = None) -> str:
        """Run a driver beside the head; returns what it prints.

        Raises:
            RuntimeError: it failed, or took longer.

        """
        log = self.folder / "driver.log"
        with log.open("w+") as output:
            process = self.sites[0].start(command, {**self.environment(0), **(env or {})}, output)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")
        if status:
            raise RuntimeError(f"{Path(command[1]).name} ended with {status}; it had {timeout_s:g} s\n{text[-2000:]}")
        return text

    def job(self, name: str, flags: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
        """Run `jobs/diloco.py` beside the head, as a user would; returns the records of metrics.jsonl."""
        runs = self.folder / "runs"
        run_flags = ("--run.dir", str(runs), "--run.name", name)
        self.run([sys.executable, JOBS / "diloco.py", *flags, *run_flags], timeout_s)
        text = (runs / name / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def environment(self, number: int) -> dict[str, str]:
        """Environment of programs at one of the sites, to be laid over this process's own."""
        folder = self.folder / str(number)
        return {**_ENVIRONMENT, "RAY_TMPDIR": str(folder), "RAY_ADDRESS": self.address}


def flags(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Tables of a job file as flags."""
    words: list[str] = []
    for table, row in tables.items():
        for key, value in row.items():
            words += [f"--{table}.{key}", str(value)]
    return words


@contextmanager
def linked(link: Link, workers: int, seq_len: int) -> Iterator[tuple[Cluster, Path]]:
    """A head and so many nodes, each behind such a link; with them a dataset of samples of `seq_len` bytes."""
    with tempfile.TemporaryDirectory() as scratch:
        dataset = Path(scratch) / "corpus"
        prepare(PrepareOptions("stdlib", str(dataset), seq_len=seq_len, max_samples=20_000), lambda kind, count: None)
        with Network([link] * (1 + workers)) as network, nodes(network) as cluster:
            yield cluster, dataset


@contextmanager
def nodes(network: Network) -> Iterator[Cluster]:
    """A Ray node at every site, while the context lasts."""
    make_token()
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # Short: Ray puts sockets there.
    cluster = Cluster(tuple(network.sites), folder)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # All at once: nodes wait for the head.
        started = [_start(cluster, number, stack) for number in range(len(cluster.sites))]
        for process, log in started:
            _ready(process, log)
        yield cluster


def _start(cluster: Cluster, number: int, stack: ExitStack) -> tuple[subprocess.Popen[str], Path]:
    """Start a node; it ends with `stack`. Returns its process and its log."""
    site = cluster.sites[number]
    folder = cluster.folder / str(number)
    folder.mkdir()
    # Nodes of one machine must not share their files: they would take each other's sockets.
    command: list[str | Path] = [
        "start",
        "--block",
        "--disable-usage-stats",
        "--temp-dir",
        folder,
        "--node-ip-address",
        site.address,
    ]
    command += [f"--object-store-memory={STORE_BYTES}", "--num-gpus=0"]
    if number:
        command += ["--address", cluster.address, "--num-cpus=1", "--memory=100000000"]
    else:
        command += ["--head", f"--port={_PORT}", "--include-dashboard=false", "--num-cpus=0", "--memory=8000000000"]
    environment = {**cluster.environment(number), "RAY_ADDRESS": ""}
    log = cluster.folder / f"node-{number}.log"
    with log.open("w") as output:
        process = site.start([*_RAY, *command], environment, output)
    stack.callback(_end, process)
    return process, log


def _ready(process: subprocess.Popen[str], log: Path) -> None:
    """Wait until a node has told the head that it is there.

    Raises:
        RuntimeError: it ended, or took too long.

    """
    deadline = time.monotonic() + START_S
    while "Ray runtime started" not in (text := log.read_text(encoding="utf-8", errors="replace")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a Ray node didn't start\n{text[-2000:]}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[str]) -> None:
    """End a node as Ray would have it; what doesn't end by itself is killed with the network."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
