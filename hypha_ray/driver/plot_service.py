"""Process that draws the plots of a run while its driver saves the model and disconnects from Ray.

    driver ──forks──► plot process ◄──load──── after the first round
                                   ◄──draw──── after the last one
                                   ──notes──►

The process is forked before the driver loads libraries and starts threads, so it costs no start of Python and little
memory. It ends with the driver, whatever the reason. Without it, or if it fails, the driver draws the plots itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from hypha_ray.driver.local_ray.fork_server import close_all_but, is_forkable
from hypha_ray.errors import HyphaError
from hypha_ray.heavy_imports import uncollected

LONGEST_S = 120.0
"""Longest wait for the plots in seconds; then the process is killed."""
MODULES = ("hypha_ray.telemetry.plots", "matplotlib.backends.backend_agg", "matplotlib.figure")
"""Modules that drawing needs."""
_LOAD = ""
"""Order to load the modules; all other orders are the folders of runs."""


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
                _serve(fork_end)
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


def _serve(orders: socket.socket) -> NoReturn:
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
