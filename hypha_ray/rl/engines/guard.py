"""Program that runs a command and ends it, with all that it has started, when its own standard input ends.

    python -m hypha_ray.rl.engines.guard COMMAND …

Standard input is a pipe of the process that needs the command, so the command ends when that process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2
END_S = 5.0
"""Time that the command has to end by itself once it is asked to."""


def main(words: list[str]) -> int:
    """Run a command; return its exit code, 128 and the number of a signal that killed it, or 143 after it was ended."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # Orphans of the command become children of this process.
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  There is one thread.
    )
    while process.poll() is None:
        if select.select([0], [], [], _POLL_S)[0] and not os.read(0, 1):
            _terminate(process)
            return 143
    _kill_all(process.pid)
    code = process.returncode
    return code if code >= 0 else 128 - code


def _terminate(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    _kill_all(process.pid)


def _kill_all(group: int) -> None:
    """Kill a process group, and orphans until none is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + END_S
    while (children := _children()) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        text = path.read_text()
    except FileNotFoundError:  # This kernel doesn't list children.
        return []
    return [int(number) for number in text.split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
