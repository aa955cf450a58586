"""A Ray of a job's own, as its driver sees it: begun early, connected to later, ended in the background."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from hypha_ray.bridge.paths import LOCAL_RAY, Scratch, sweep
from hypha_ray.config import Job
from hypha_ray.driver.local_ray.fork_server import FIRST_JOB, fork_server
from hypha_ray.driver.local_ray.head import LATER
from hypha_ray.driver.local_ray.worker import SOCKET
from hypha_ray.heavy_imports import uncollected

END_S = 10.0
"""Longest wait for the end of Ray's processes, in seconds; then they are killed."""
ACTORS = (
    "ray._private.workers.default_worker",
    "ray.util.state",
    "hypha_ray.data.actor",
    "hypha_ray.model.lora",
    "hypha_ray.scheduler.runtime.actor",
    "hypha_ray.server.outer",
    "hypha_ray.server.reduce",
    "hypha_ray.store.actor",
    "hypha_ray.telemetry.actor",
    "hypha_ray.batch_size",
    "hypha_ray.worker.loop",
)
"""Modules that actors need, with all that they import."""


class NotStarted(Exception):
    """End of a Ray before it had an address; the text is Ray's."""


class RayService:
    """Ray on this machine, for this process alone. It begins to start at once; `close` ends it.

    Its processes end with this process, however that ends.

    Args:
        forks: whether workers are to be forked from this process, when it calls `fork_workers`.

    """

    def __init__(self, forks: bool = True) -> None:
        sweep()  # Drivers that were killed have left theirs behind.
        self._folder = Scratch(LOCAL_RAY)
        path = str(self._folder.path / "fork_server")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.can_fork = forks and "ray" not in sys.modules and _listens(self._listener, path)
        """Whether workers can be forked: not after Ray was loaded, because Ray reads some variables of workers then."""
        self._server: int | None = None
        """Process id of the fork server; None without one."""
        self._server_end, self._end = os.pipe()
        """Ends of a pipe: the fork server ends when this process, with the second one, has ended."""
        self._address = ""
        script = Path(__file__).with_name("head.py")
        self._head = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, SOCKET: path},
            start_new_session=True,  # Ctrl-C is for the driver, which ends the head.
            text=True,
        )
        if self.can_fork:
            os.environ |= _read_by_ray(self._head.pid)
        else:
            self._listener.close()  # Workers start by themselves.

    def fork_workers(self) -> None:
        """Fork workers from this process as it is now; if that isn't safe, each worker loads its libraries."""
        assert self.can_fork
        self._server = fork_server(self._listener, self._server_end)
        for name in _read_by_ray(self._head.pid):
            del os.environ[name]
        self._listener.close()  # Without a server, workers that wait for it start by themselves.
        os.close(self._server_end)

    def address(self) -> str:
        """Address of Ray's control service, once that answers.

        Raises:
            NotStarted: Ray didn't start.

        """
        if not self._address:
            assert self._head.stdout is not None
            line = self._head.stdout.readline()
            answer = json.loads(line) if line else {"error": "RuntimeError", "text": "its process has ended"}
            if "address" not in answer:
                raise NotStarted(answer["text"] or answer["error"])
            self._address = answer["address"]
        return self._address

    def start_rest(self) -> None:
        """Let the processes of Ray start that training doesn't need. Idempotent."""
        assert self._head.stdin is not None
        with suppress(OSError, ValueError):  # It is being ended.
            self._head.stdin.write(f"{LATER}\n")
            self._head.stdin.flush()

    def end(self) -> None:
        """Begin to end all of Ray's processes, without a wait. Idempotent."""
        assert self._head.stdin is not None
        self._listener.close()
        with suppress(OSError):
            self._head.stdin.close()
        if self._end >= 0:
            os.close(self._end)
            self._end = -1

    def close(self) -> None:
        """End all of Ray's processes. Idempotent."""
        self.end()
        try:
            self._head.wait(END_S)
        except subprocess.TimeoutExpired:
            self._head.kill()  # The system ends the others with it.
            self._head.wait()
        if self._server is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)
            self._server = None
        self._folder.close()


def _listens(listener: socket.socket, path: str) -> bool:
    """Let a socket listen at a path, unless that is too long for one; returns whether it does."""
    try:
        listener.bind(path)
    except OSError:
        return False
    listener.listen(128)
    return True


def _read_by_ray(head: int) -> dict[str, str]:
    """Variables that Ray reads as it is loaded, and that the raylet gives to its workers, which are forked afterwards.

    A worker ends if the raylet's process has. The head stands in for that, because it ends with the raylet.
    """
    return {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(head)}


def load_libraries(job: Job) -> None:
    """Load the modules of actors and of the job's model; the actors report modules that can't be loaded."""
    with uncollected():
        for name in (*ACTORS, *_model_modules(job)):
            with suppress(ImportError):
                import_module(name)


def _model_modules(job: Job) -> list[str]:
    """Modules with the job's model, as far as its configuration is on this machine."""
    config = job.model.config or {}
    if job.model.repository:
        with suppress(OSError, ValueError):
            file = Path(job.model.repository).expanduser() / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
    kind = str(config.get("model_type", "")).replace("-", "_")
    if not kind.isidentifier():
        return []
    return [f"transformers.models.{kind}.modeling_{kind}"]
