"""Ray's processes in Python, forked from one that has loaded their libraries: a start takes no seconds.

A raylet starts a worker as always. `at_start/sitecustomize.py` hands the new process's command line, environment and
streams over to a process that has loaded torch and transformers. That one forks a *template* for all workers whose
variables of Ray are alike but for their job and node; it loads Ray, which reads them. The template forks a process for
each worker, which has Ray read them again and runs Ray's script as it is. Dashboards and agents have another.
"""

from __future__ import annotations

import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import pytest

from tests.support.gap_filling import fills_gaps
from tests.support.ray_settings import reader

AT_START = Path(__file__).parent / "at_start"
ROOT = Path(__file__).parents[2]
TOOLS = str(ROOT / "tools")
"""Folder that the chaos lab puts before PYTHONPATH: nothing there has the name of a library."""
NETWORK = Path("/proc/self/ns/net")
"""The network that a process is in: a fork stays in that of its parent."""
OF_SKLEARN = {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}
"""Variables that scikit-learn sets as it is loaded, at whatever time: a fork is for the same variables alone."""
OF_ONE_JOB = {"RAY_JOB_ID", "RAY_NODE_ID", "RAY_RAYLET_PID", "RAY_TMPDIR"}
"""Variables that differ from job to job or node to node: daemons read them late, workers again."""
OF_DAEMONS = ("ray.dashboard.head", "ray._private.runtime_env.agent.runtime_env_agent")
MOST_BYTES = 1 << 18
MOST_TEMPLATES = 6
"""Most templates, those used last: each has the memory of all libraries."""


@pytest.fixture(scope="package", autouse=True)
def workers_are_forked() -> Iterator[None]:
    """A fixture for whole folders of tests: fork the workers of each Ray that they, or jobs of theirs, start."""
    if fills_gaps():
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="forks") as folder,
        pytest.MonkeyPatch.context() as patch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
    ):
        patch.setenv("PYTHONPATH", str(AT_START), prepend=os.pathsep)
        patch.setenv("TEST_FORKS", folder)
        for name, value in OF_SKLEARN.items():
            patch.setenv(name, value)
        loaded = [sys.prefix, str(NETWORK.readlink()), TOOLS, dict(os.environ)]
        Path(folder, "loaded").write_text(json.dumps(loaded))
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
        message, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
        streams.append(asking.detach())
        environment, daemon = (json.loads(message)[name] for name in ("environment", "daemon"))
        read = {name for name in environment if name.startswith("RAY_")} - OF_ONE_JOB
        key = tuple(sorted(f"{name}={environment[name]}" for name in read)) + (("daemon",) if daemon else ())
        try:
            socket.send_fds(templates[key], [message], streams)
        except (KeyError, OSError):  # There is none yet, or it has ended.
            templates[key] = new_template(environment, daemon, [server, *templates.values()], streams)
            socket.send_fds(templates[key], [message], streams)
        templates[key] = templates.pop(key)
        for oldest in [*templates][:-MOST_TEMPLATES]:
            templates.pop(oldest).close()
        for stream in streams:
            os.close(stream)


def new_template(
    environment: dict[str, str], daemons: bool, unused: list[socket.socket], streams: list[int]
) -> socket.socket:
    """Fork a process that loads Ray with these variables, and has neither unused sockets nor the streams open.

    Returns the socket that takes the starts of its workers, or of daemons.
    """
    own, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for other in (own, *unused):
            other.close()
        for stream in streams:
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        if daemons:
            load_daemons()
        else:
            import_module("tests.support.libraries_with_ray")
        fork_workers(its)
    its.close()
    return own


def load_daemons() -> None:
    """Load what dashboards and agents load, of which the dashboard's own parts are found by their folder."""
    import ray.dashboard.modules

    parts = pkgutil.walk_packages(ray.dashboard.modules.__path__, "ray.dashboard.modules.")
    for name in (*OF_DAEMONS, *(part.name for part in parts)):
        import_module(name)


def fork_workers(starts: socket.socket) -> NoReturn:
    """Fork for each process whose start comes, until nobody can send one."""
    read_settings = reader()
    while True:
        message, streams, _, _ = socket.recv_fds(starts, MOST_BYTES, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            starts.close()
            become_worker(json.loads(message), read_settings, *streams)
        for stream in streams:
            os.close(stream)


def become_worker(start: dict[str, Any], read_settings: Callable[[], None], *streams: int) -> NoReturn:
    """Run Ray's script in this process as if it had been started by the raylet.

    Args:
        start: what the process that was handed over has, see `at_start/sitecustomize.py`.
        read_settings: has Ray take its settings from the variables that this process has then.
        streams: its standard streams, and a connection to it.

    """
    from hypha_ray.driver.forks import run_to_end, take_place

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, connection = streams
    if start["daemon"]:
        Thread(target=end_with, args=(socket.socket(fileno=connection),), daemon=True).start()
    else:
        os.close(connection)
    take_place(start, standard)
    read_settings()
    sys.argv = start["command"]
    has_tools = os.environ["PYTHONPATH"].startswith(f"{TOOLS}{os.pathsep}")
    place = sys.path.index(str(ROOT))
    sys.path[place : place + 1] = [str(Path(sys.argv[0]).parent), *([TOOLS] if has_tools else [])]
    sys.path[:] = dict.fromkeys(sys.path)  # As Python does it with its variable's folders.
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked_signals"])
    run_to_end(sys.argv[0])


def end_with(other: socket.socket) -> NoReturn:
    """End when the process behind a connection does."""
    other.recv(1)
    os._exit(0)


if __name__ == "__main__":
    import tests.support.libraries  # noqa: F401 # For all forks.

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    hand_on(socket.socket(fileno=int(sys.argv[1])))
