"""Ray's worker processes, forked from one that has loaded their libraries: a start takes no seconds.

A raylet starts a worker as always. `at_start/sitecustomize.py` hands the new process's command line, environment and
streams over to a process that has loaded torch and transformers, and that one forks. The fork runs Ray's script as it
is. Only the fork loads Ray, which then reads its variables, and seeds the random ids that forks mustn't share.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AT_START = Path(__file__).parent / "at_start"
ROOT = Path(__file__).parents[2]
NETWORK = Path("/proc/self/ns/net")
"""The network that a process is in: a fork stays in that of its parent."""
OF_SKLEARN = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
"""Variables that scikit-learn sets as it is loaded, at whatever time: a fork is for the same variables alone."""
MOST_BYTES = 1 << 18


@pytest.fixture(scope="package", autouse=True)
def workers_are_forked() -> Iterator[None]:
    """A fixture for whole folders of tests: fork the workers of each Ray that they, or jobs of theirs, start."""
    with (
        tempfile.TemporaryDirectory(prefix="forks") as folder,
        pytest.MonkeyPatch.context() as patch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
    ):
        patch.setenv("PYTHONPATH", str(AT_START), prepend=os.pathsep)
        patch.setenv("TEST_FORKS", folder)
        for name, value in OF_SKLEARN.items():
            patch.setenv(name, value)
        Path(folder, "loaded").write_text(json.dumps([sys.prefix, str(NETWORK.readlink()), dict(os.environ)]))
        server.bind(f"{folder}/socket")
        server.listen(128)
        command = [sys.executable, "-m", __name__, str(server.fileno())]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[server.fileno()], stdin=subprocess.PIPE):
            yield  # It ends when its standard input does.


def fork_workers(server: socket.socket) -> None:
    """Fork for each worker that is handed over, until standard input ends."""
    while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
        asking, _ = server.accept()
        with asking:
            message, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
        if os.fork() == 0:
            server.close()
            become_worker(json.loads(message), streams)
        for stream in streams:
            os.close(stream)


def become_worker(start: dict[str, Any], streams: list[int]) -> None:
    """Run Ray's script in this process as if it had been started by the raylet."""
    import numpy as np

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.nice(start["nice"] - os.nice(0))
    Path("/proc/self/oom_score_adj").write_text(start["oom_score_adj"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    np.random.seed()
    sys.argv = start["command"]
    sys.path[sys.path.index(str(ROOT))] = str(Path(sys.argv[0]).parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked_signals"])
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    import tests.support.libraries  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    fork_workers(socket.socket(fileno=int(sys.argv[1])))
