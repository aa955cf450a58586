"""Ray's worker processes, forked from one that has loaded their libraries: a start takes no seconds.

A raylet starts a worker as always. `at_start/sitecustomize.py` hands the new process's command line, environment and
streams over to the process that has loaded torch and transformers. For each raylet that one forks another, which loads
Ray with that raylet's variables and forks its workers. A worker runs Ray's script as it is.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

AT_START = Path(__file__).parent / "at_start"
ROOT = Path(__file__).parents[2]
MOST_BYTES = 1 << 18


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork the workers of each Ray that this process, or one that it starts, starts meanwhile."""
    with (
        tempfile.TemporaryDirectory(prefix="forks") as folder,
        pytest.MonkeyPatch.context() as patch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
    ):
        patch.setenv("PYTHONPATH", str(AT_START), prepend=os.pathsep)
        patch.setenv("TEST_FORKS", folder)
        Path(folder, "loaded").write_text(json.dumps([sys.prefix, dict(os.environ)]))
        server.bind(f"{folder}/socket")
        server.listen(128)
        command = [sys.executable, "-m", __name__, str(server.fileno())]
        with subprocess.Popen(command, cwd=ROOT, pass_fds=[server.fileno()], stdin=subprocess.PIPE):
            yield  # It ends when its standard input does.


def fork_for_raylets(server: socket.socket) -> None:
    """Fork a process for each raylet, and hand its workers' starts on to it, until standard input ends."""
    raylets: dict[frozenset[tuple[str, str]], socket.socket] = {}
    while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
        asking, _ = server.accept()
        with asking:
            message, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
        environment = json.loads(message)["environment"]
        key = frozenset(variable for variable in environment.items() if variable[0].startswith("RAY_"))
        if key not in raylets:
            raylets[key], its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                server.close()
                for other in raylets.values():
                    other.close()
                os.environ.clear()
                os.environ.update(environment)
                return fork_workers(its_end)
            its_end.close()
        with suppress(BrokenPipeError):  # The raylet has died.
            socket.send_fds(raylets[key], [message], streams)
        for stream in streams:
            os.close(stream)
    return None


def fork_workers(starts: socket.socket) -> None:
    """Fork the workers of one raylet, until it ends."""
    import tests.support.job_libraries  # noqa: F401

    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    while raylet not in select.select([starts, raylet], [], [])[0]:
        message, streams, _, _ = socket.recv_fds(starts, MOST_BYTES, 3)
        if not message:
            return
        if os.fork() == 0:
            starts.close()
            os.close(raylet)
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
    fork_for_raylets(socket.socket(fileno=int(sys.argv[1])))
