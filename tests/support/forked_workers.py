"""Ray's worker processes, forked from one that has loaded their libraries: a start takes no seconds.

A raylet starts a worker as always. `at_start/sitecustomize.py` hands the new process's command line, environment and
streams over to a process that has loaded torch and transformers. That one forks a *template* for each job of a raylet,
which loads Ray with the variables of these workers, since Ray reads them as it is loaded. The template forks a process
for each worker, which runs Ray's script as it is. Ray seeds its random ids at the first, which a template never draws.
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
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest

AT_START = Path(__file__).parent / "at_start"
ROOT = Path(__file__).parents[2]
NETWORK = Path("/proc/self/ns/net")
"""The network that a process is in: a fork stays in that of its parent."""
OF_SKLEARN = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
"""Variables that scikit-learn sets as it is loaded, at whatever time: a fork is for the same variables alone."""
DRAWS_ID = "hypha_ray.scheduler.runtime.actor_owner"
"""Module that makes classes of actors, and thereby random ids, as it is loaded."""
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


def hand_on(server: socket.socket) -> None:
    """Send on each worker that is handed over to the template with its variables, until standard input ends."""
    templates: dict[tuple[str, ...], socket.socket] = {}
    while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
        asking, _ = server.accept()
        with asking:
            message, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
        environment = json.loads(message)["environment"]
        key = tuple(sorted(f"{name}={value}" for name, value in environment.items() if name.startswith("RAY_")))
        try:
            socket.send_fds(templates[key], [message], streams)
        except (KeyError, OSError):  # There is none yet, or it has ended.
            templates[key] = new_template(environment, server)
            socket.send_fds(templates[key], [message], streams)
        for stream in streams:
            os.close(stream)


def new_template(environment: dict[str, str], server: socket.socket) -> socket.socket:
    """Fork a process that loads Ray with these variables; returns the socket that takes its workers' starts."""
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        server.close()
        own.close()
        os.environ.clear()
        os.environ.update(environment)
        import_module("ray._private.workers.default_worker")
        load_own_modules(but=DRAWS_ID)
        fork_workers(its, os.pidfd_open(int(environment["RAY_RAYLET_PID"])))
    its.close()
    return own


def fork_workers(starts: socket.socket, raylet: int) -> NoReturn:
    """Fork for each worker whose start comes, until the raylet or the process that hands on has ended."""
    while raylet not in select.select([starts, raylet], [], [])[0]:
        message, streams, _, _ = socket.recv_fds(starts, MOST_BYTES, 3)
        if not message:
            break
        if os.fork() == 0:
            starts.close()
            os.close(raylet)
            become_worker(json.loads(message), streams)
        for stream in streams:
            os.close(stream)
    os._exit(0)


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
    from tests.support.libraries import load_own_modules

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    hand_on(socket.socket(fileno=int(sys.argv[1])))
