"""The error boundary of every job script: one line and an exit code for user errors, a traceback for bugs.

It also guards against libraries that end the process: Intel's MKL exits with code 2 if it can't load itself in a
moment. That code would say that the command line is wrong. Under load it happens once in some starts, and not the next
time. So the process begins anew, once, and ends with the code for "try again" the second time. Python sees nothing of
an exit from C, but the C library calls what `__cxa_atexit` has registered. Other C libraries than glibc have no guard.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypha_ray.config.cli.output import endure, unwritten
from hypha_ray.errors import ClusterError, DataError, HyphaError

CODE = 2
"""Exit code of such a library."""
_TRIED = "_HYPHA_RAY_BEGUN_ANEW"
"""Variable of the environment that a process has which begins anew; its children don't."""


@contextmanager
def begun_anew() -> Iterator[None]:
    """Begin this process anew, with the same command, if a library ends it meanwhile by an exit with `CODE`."""
    is_second_try = os.environ.pop(_TRIED, None) is not None
    library = ctypes.CDLL(None)
    process = os.getpid()
    if not hasattr(library, "__cxa_atexit") or not hasattr(library, "__cxa_finalize"):
        yield
        return
    armed = [True]

    def on_exit(_: Any, code: int) -> None:
        if armed and code == CODE and os.getpid() == process:
            if is_second_try:
                _end()
            else:
                _begin()

    kind: Callable[..., Any] = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
    callback = kind(on_exit)
    mark = ctypes.create_string_buffer(1)
    library.__cxa_atexit(callback, None, mark)
    try:
        yield
    finally:
        armed.clear()
        library.__cxa_finalize(mark)  # Calls it, and forgets it: it must not be called when Python has ended.


def _begin() -> None:
    """Replace this process by the same command."""
    print("note: a library couldn't be loaded and ended the process; it begins anew", file=sys.stderr, flush=True)
    os.environ[_TRIED] = "1"
    arguments = sys.orig_argv[1:]
    os.execv(sys.executable, [sys.executable, *arguments])


def _end() -> None:
    """End this process with the code that asks for another try."""
    problem = "a library couldn't be loaded, twice, and ended the process"
    fix = "see its message above; submit it again"
    error = ClusterError("ENV001", problem, f"exit code {CODE}", fix=fix)
    print(error, file=sys.stderr, flush=True)
    os._exit(error.exit_code)


INTERRUPTED = 130


def run(main: Callable[[], None]) -> None:
    """Run a job script's `main`.

    An error from a Ray task has both its own class and Ray's, and a traceback as its text. The user sees its `cause`,
    the error that the task raised.

    Raises:
        SystemExit: with the error's exit code after a HyphaError, or with 130 after Ctrl-C.

    """
    endure()
    # What transformers would say of its own accord means nothing to users of a job. A value that is set already stays.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with begun_anew():
            main()
        if reason := unwritten():
            fix = "free some space, or redirect the output"
            raise DataError("OUT001", "the job is done, but standard output can't be written", reason, fix=fix)
    except HyphaError as error:
        cause: HyphaError = getattr(error, "cause", error)
        lines = str(cause).splitlines()
        print(" ".join(lines), file=sys.stderr)
        raise SystemExit(cause.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
