"""The error boundary of every job script: one line and an exit code for user errors, a traceback for bugs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hypha_ray.config.cli.library_exit import begun_anew
from hypha_ray.config.cli.streams import endure, unwritten
from hypha_ray.errors import DataError, HyphaError

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
        print(" ".join(str(cause).splitlines()), file=sys.stderr)
        raise SystemExit(cause.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
