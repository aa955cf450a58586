"""Forks of a driver: the server that becomes workers of Ray, and the process that draws plots while the model is saved.

The server forks workers from a process that has loaded their libraries: a start costs no seconds of CPU. It is forked
from the driver before that has models, a connection to Ray, or threads other than its heartbeat. Its forks run Ray's
script for workers as it is. Ray draws the seed of its random ids with the first id, so nothing that is loaded before
may draw any.

    driver ──forks──► plot process ◄──load──── after the first round
                                   ◄──draw──── after the last one
                                   ──notes──►

The plot process is forked before the driver loads libraries and starts threads, so it costs no start of Python and
little memory. It ends with the driver, whatever the reason. Without it, or if it fails, the driver draws the plots.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hypha_ray.config import Job
from hypha_ray.driver.ray_worker import MOST_BYTES, TAKEN
from hypha_ray.errors import HyphaError
from hypha_ray.files import uncollected

READ_BY_LIBRARIES = ("HF_", "KMP_", "LD_", "MKL_", "NUMBA_", "OMP_", "PYTHONPATH", "TORCH_", "TRANSFORMERS_")
"""Beginnings of variables that libraries may read as they are loaded."""
READ_LATER = {"HF_TOKEN", "LD_PRELOAD"}
"""Variables with such beginnings that are read later, or that Ray takes from its workers."""
GPUS = ("/dev/nvidia", "/dev/kfd")
"""Beginnings of the files of GPUs."""
FIRST_JOB = "01000000"
"""Ray's id of the first driver of a cluster."""
POLL_S = 1.0
"""Seconds between two looks for workers that have ended."""
PARTING_S = 1.0
"""Longest time in seconds that workers have to end by themselves once the driver has."""
LONGEST_S = 120.0
"""Longest wait for the plots in seconds; then the process is killed."""
MODULES = ("hypha_ray.telemetry.plots", "matplotlib.backends.backend_agg", "matplotlib.figure")
"""Modules that drawing needs."""
_LOAD = ""
"""Order to load the modules; all other orders are the folders of runs."""
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
    model_type = str(config.get("model_type", "")).replace("-", "_")
    if not model_type.isidentifier():
        return []
    return [f"transformers.models.{model_type}.modeling_{model_type}"]


def fork_server(listener: socket.socket, driver: int) -> int | None:
    """Fork this process; the fork serves until the driver has ended.

    Args:
        listener: socket that starts of workers come to.
        driver: end of a pipe whose other end only the driver has.

    Returns:
        Process id of the server; None if this process can't be forked safely: it has threads, or uses a GPU.

    """
    if not is_forkable():
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        close_all_but({0, 1, 2, listener.fileno(), driver})
        _serve(listener, driver)
    finally:
        os._exit(1)


def is_forkable() -> bool:
    """Whether a fork of this process can work: it has no threads besides its heartbeat, and uses no GPU."""
    if sys.platform != "linux":
        return False
    if any(thread.name not in ("MainThread", "heartbeat") for thread in threading.enumerate()):
        return False
    return not uses_gpu(Path("/proc/self/fd"))


def uses_gpu(descriptors: Path) -> bool:
    """Whether a process has a GPU open, which its forks couldn't use; `descriptors` is its folder of /proc."""
    for descriptor in descriptors.iterdir():
        with suppress(OSError):  # The descriptor was closed meanwhile.
            if str(descriptor.readlink()).startswith(GPUS):
                return True
    return False


def close_all_but(spared_descriptors: set[int]) -> None:
    """Close the driver's file descriptors, such as its locks, which are held as long as any fork has them open."""
    descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    for descriptor in descriptors:
        if descriptor not in spared_descriptors:
            with suppress(OSError):  # The descriptor of the listing itself is closed already.
                os.close(descriptor)


def _serve(listener: socket.socket, driver: int) -> NoReturn:
    """Fork a process for each worker that is handed over; end it if it outlives the driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    loaded_with = _read_by_libraries(dict(os.environ))
    workers: set[int] = set()
    while True:
        readable, _, _ = select.select([listener.fileno(), driver], [], [], POLL_S)
        if driver in readable:
            break
        if readable:
            worker = _fork_worker(listener, driver, loaded_with)
            if worker is not None:
                workers.add(worker)
        workers -= _reap(workers)
    deadline = time.monotonic() + PARTING_S
    while workers and time.monotonic() < deadline:
        time.sleep(0.02)
        workers -= _reap(workers)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    os._exit(0)


def _read_by_libraries(environment: dict[str, str]) -> dict[str, str]:
    """Variables with which other libraries might be loaded, or in another way."""
    variables = {}
    for name, value in environment.items():
        if name.startswith(READ_BY_LIBRARIES) and name not in READ_LATER:
            variables[name] = value
    return variables


def _reap(workers: set[int]) -> set[int]:
    """Return the workers that have ended; their process ids are free from now on."""
    ended_pids = set()
    for worker in workers:
        pid, _ = os.waitpid(worker, os.WNOHANG)
        if pid:
            ended_pids.add(worker)
    return ended_pids


def _fork_worker(listener: socket.socket, driver: int, loaded_with: dict[str, str]) -> int | None:
    """Fork a process that becomes the next worker; None if it has given up or needs other libraries."""
    connection, _ = listener.accept()
    streams: list[int] = []
    try:
        message, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        start = json.loads(message)
        environment = start["environment"]
        if start["prefix"] != sys.prefix or _read_by_libraries(environment) != loaded_with:
            return None
        if environment["RAY_JOB_ID"] != FIRST_JOB:
            return None
        connection.send(TAKEN)
        pid = os.fork()
        if pid == 0:
            for descriptor in (listener.fileno(), connection.fileno(), driver):
                os.close(descriptor)
            _become_worker(start, streams)
        return pid
    except (OSError, ValueError, KeyError):  # The process has ended meanwhile.
        return None
    finally:
        connection.close()
        for stream in streams:
            os.close(stream)


def _become_worker(start: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run Ray's script in this process as if the raylet had started it; it never returns into the driver's code.

    Args:
        start: process that is replaced, see `ray_worker.hand_over`.
        streams: its standard streams.

    """
    import weakref

    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # The driver's temporary folders aren't the worker's.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take_place(start, streams)
    sys.argv = start["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    sys.stdout = sys.__stdout__
    sys.stderr = sys.__stderr__
    signal.pthread_sigmask(signal.SIG_SETMASK, start["blocked_signals"])
    run_to_end(sys.argv[0])


def run_to_end(script: str) -> NoReturn:
    """Run a script in this process, and end it without taking apart what is loaded: that takes a quarter second."""
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        _run_exit_functions()
        os._exit(code)


def take_place(start: dict[str, Any], streams: list[int]) -> None:
    """Give this process the group, priority, streams, environment and folder of another one; seed numpy anew.

    Args:
        start: the other process, see `ray_worker.hand_over`.
        streams: its standard streams, which are closed.

    """
    import numpy as np

    os.setpgid(0, 0)
    os.nice(start["nice"] - os.nice(0))
    with suppress(OSError):  # Lower values are for root alone.
        Path("/proc/self/oom_score_adj").write_text(start["oom_score_adj"], encoding="ascii")
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    np.random.seed()


def _run_exit_functions() -> None:
    """Run the exit functions of this process, without the driver's frames below this one."""
    import atexit

    atexit._run_exitfuncs()


class PlotService:
    """A fork of this process, which draws one run's plots. There is none if this process can't be forked safely.

    Args:
        forks: whether this process may be forked; a user's program may not.

    """

    def __init__(self, forks: bool = True) -> None:
        self.pid: int | None = None
        """Process id; None if there is no such process."""
        self._socket: socket.socket | None = None
        self._is_drawing = False
        if not forks or not is_forkable():
            return
        driver_end, fork_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                _draw_for_driver(fork_end)
            finally:
                os._exit(1)
        fork_end.close()
        driver_end.settimeout(LONGEST_S)
        self._socket = driver_end

    def load(self) -> None:
        """Let the modules for drawing be loaded, as far as possible: drawing reports missing ones."""
        if self._socket is None:
            load_modules()
        else:
            self._order(_LOAD)

    def draw(self, run_directory: Path) -> None:
        """Begin to draw a finished run's plots, unless that has begun."""
        if not self._is_drawing:
            self._order(str(run_directory))
            self._is_drawing = True

    def notes(self, run_directory: Path) -> list[str]:
        """Wait for the plots; returns a note if they can't be drawn."""
        self.draw(run_directory)
        if self._socket is not None:
            with suppress(OSError, ValueError), self._socket.makefile(encoding="utf-8") as answers:
                notes: list[str] = json.loads(answers.readline())
                return notes
        return draw_plots(run_directory)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = None

    def _order(self, text: str) -> None:
        if self._socket is not None:
            order = json.dumps(text) + "\n"
            with suppress(OSError):  # The process has ended, which `notes` will find.
                self._socket.sendall(order.encode())


def draw_plots(run_directory: Path) -> list[str]:
    """Draw a finished run's plots; return a note, not an error, if they can't be drawn: the model is saved."""
    with uncollected():
        from hypha_ray.telemetry.plots import draw

    try:
        draw(run_directory)
    except HyphaError as error:
        return [f"the plots were not drawn: {error}"]
    return []


def load_modules() -> None:
    """Load the modules for drawing, as far as that is possible."""
    with uncollected():
        for name in MODULES:
            with suppress(ImportError):
                import_module(name)


def _draw_for_driver(orders: socket.socket) -> NoReturn:
    """Follow the driver's orders until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    close_all_but({0, 1, 2, orders.fileno()})
    with orders.makefile(encoding="utf-8") as lines:
        for line in lines:
            order = json.loads(line)
            if order == _LOAD:
                load_modules()
            else:
                answer = json.dumps(draw_plots(Path(order))) + "\n"
                orders.sendall(answer.encode())
    os._exit(0)
