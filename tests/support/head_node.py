"""A head node in processes of its own, for jobs to join."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.forked_process import ForkedProcess
from tests.support.job_scripts import left_behind


@contextmanager
def head_node() -> Iterator[str]:
    """Address of a cluster of one node with four logical CPUs and no GPU, which leaves no process behind."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    command = ["ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--include-dashboard=false"]
    command += [f"--temp-dir={folder}", "--num-cpus=4", "--num-gpus=0", "--object-store-memory=300000000"]
    command += [f"--{name}={free_port()}" for name in ("ray-client-server-port", "dashboard-agent-listen-port")]
    with ForkedProcess(command, os.environ | {"RAY_TMPDIR": str(folder)}) as process:
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
