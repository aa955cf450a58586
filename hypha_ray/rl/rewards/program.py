"""Process of a response's program, started by `program_guard.py`: it runs the program, and then the tests.

    python -I program.py FOLDER

It stops itself when the program has got to its end, and again when the tests have passed. Its parent takes these stops
for the verdict, so this process holds no descriptor and no secret that a program could find. The tests are in the
folder only after the first stop.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import types
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER = 0x10000000
LIMIT_S = 10
"""Longest time of a program, and of its processor."""
_LIMITS = {
    resource.RLIMIT_CPU: LIMIT_S,
    resource.RLIMIT_AS: 1 << 30,
    resource.RLIMIT_FSIZE: 1 << 24,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_CORE: 0,
}


def main(folder: str) -> None:
    """Run program and tests in one namespace, but in frames of their own."""
    os.chdir(Path(folder, "work"))
    _confine()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    # A program may replace what is built in, so names are bound before it runs.
    translate = compile
    run = exec
    stop = signal.raise_signal
    for file in (Path(folder, "program.py"), Path(folder, "tests.py")):
        run(translate(file.read_bytes(), file.name, "exec", dont_inherit=True), vars(module))
        stop(signal.SIGSTOP)


def _confine() -> None:
    """End with the parent, use no more than the limits, and see no memory or environment of other processes."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.unshare(_CLONE_NEWUSER)  # Not every kernel allows it.
    for name, limit in _LIMITS.items():
        resource.setrlimit(name, (limit, limit))


if __name__ == "__main__":
    main(sys.argv[1])
