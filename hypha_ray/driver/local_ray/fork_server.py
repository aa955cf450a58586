"""Server that forks workers of Ray from a process which has loaded their libraries: a start costs no seconds of CPU.

It is forked from the driver before that has models, a connection to Ray, or threads other than its heartbeat. Its forks
run Ray's script for workers as it is. Ray draws the seed of its random ids with the first id, so nothing that is loaded
before may draw any.
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
from pathlib import Path
from typing import Any, NoReturn

from hypha_ray.driver.local_ray.worker import MOST_BYTES, TAKEN

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
        with suppress(OSError):  # It was closed meanwhile.
            if str(descriptor.readlink()).startswith(GPUS):
                return True
    return False


def close_all_but(spared: set[int]) -> None:
    """Close the driver's file descriptors, such as its locks, which are held as long as any fork has them open."""
    descriptors = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    for descriptor in descriptors:
        if descriptor not in spared:
            with suppress(OSError):  # That of the folder itself is closed already.
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
        ready, _, _ = select.select([listener.fileno(), driver], [], [], POLL_S)
        if driver in ready:
            break
        if ready:
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
    ended = set()
    for worker in workers:
        pid, _ = os.waitpid(worker, os.WNOHANG)
        if pid:
            ended.add(worker)
    return ended


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
    except (OSError, ValueError, KeyError):  # It has ended meanwhile.
        return None
    finally:
        connection.close()
        for stream in streams:
            os.close(stream)


def _become_worker(start: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run Ray's script in this process as if the raylet had started it; it never returns into the driver's code.

    Args:
        start: process that is replaced, see `worker.hand_over`.
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
        start: the other process, see `worker.hand_over`.
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
