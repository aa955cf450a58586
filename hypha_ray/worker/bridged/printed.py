"""Output of an external trainer: kept in a log up to a limit, since it could otherwise fill the run's disk."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import IO

from hypha_ray.config import Job
from hypha_ray.modes import opener

MAX_BYTES = 16 << 20
"""Most output of one process. A log that is longer makes room for a new one, and is kept until that one is, too."""
_PART = 1 << 16
_CUT = b"\n[what else it prints is left out]\n"


class Printed:
    """A pipe that is read to its end, and whose first bytes go to a file.

    Args:
        file: where to; None: this process's standard error.

    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self._source, target = os.pipe()
        self.target = os.fdopen(target, "wb", buffering=0)
        """File that the process prints to; it is closed here once the process has it."""
        self._thread = threading.Thread(target=self._copy, name="bridge-printed", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until no process has the pipe any more; no other process is given it from here on."""
        self.target.close()
        self._thread.join(seconds)

    def _copy(self) -> None:
        room = MAX_BYTES
        with os.fdopen(self._source, "rb", buffering=0) as source, self._file or contextlib.nullcontext():
            while part := source.read(_PART):
                if room > 0:
                    self._keep(part[:room] + (_CUT if len(part) > room else b""))
                    room -= len(part)

    def _keep(self, part: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # A full disk, or no standard error: it is only a log.
            file = self._file or sys.stderr.buffer
            file.write(part)
            file.flush()


def trainer_log(job: Job, worker: int) -> IO[bytes] | None:
    """The trainer's file among the run's logs, if this node has the run directory."""
    folder = Path(str(job.run.dir), str(job.run.name), "logs")
    if job.run.dir is None or not folder.is_dir():
        return None
    path = folder / f"worker-{worker}.log"
    if path.exists() and path.stat().st_size > MAX_BYTES:
        path.replace(path.with_suffix(".log.1"))
    return open(path, "ab", opener=opener)
