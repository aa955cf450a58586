"""Job scripts and `ray` in processes of their own, forked from one that has loaded their libraries."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import TIMEOUT_MAX, Timer
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.libraries_with_ray", "ray.autoscaler.sdk", "ray.util.state"])


class ForkedProcess:
    """A running script or module, with the part of `subprocess.Popen` that tests need.

    Args:
        line: a file that ends in .py or the name of a module, and arguments.
        environment: all variables. Libraries have been loaded with those of the tests, and see changes to none that
            they read as they are loaded.
        folder: where it runs.
        constants: values that constants have there, by names such as ``hypha_ray.module.NAME``.

    """

    def __init__(
        self,
        line: Sequence[str],
        environment: dict[str, str],
        folder: Path = ROOT,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.args = line
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self._errors = Path(file.name)
        reader, writer = Pipe(duplex=False)
        arguments = (self.args, environment, folder, writer, self._errors, constants or {})
        self._process = CONTEXT.Process(target=_run, args=arguments)
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        reader.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; −n if signal n has ended it."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; returns what it has written to standard output, from here on, and to standard error.

        It is killed after `timeout` seconds; never if that is None.
        """
        limit = Timer(timeout or TIMEOUT_MAX, self.kill)
        limit.start()
        output = self.stdout.read()
        self._process.join()
        limit.cancel()
        errors = self._errors.read_text(encoding="utf-8") if self._errors.exists() else ""
        self._errors.unlink(missing_ok=True)
        return output, errors

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.join()
        self.stdout.close()
        self._errors.unlink(missing_ok=True)


def run_script(
    script: str, *arguments: str, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script of jobs/ to its end, with further variables, which no library reads as it is loaded."""
    process = ForkedProcess([f"jobs/{script}", *arguments], os.environ | environment)
    output, errors = process.communicate(timeout_s)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _run(
    line: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    output: Connection,
    errors: Path,
    constants: Mapping[str, float],
) -> None:
    """Become a process as the shell would have started it."""
    os.dup2(output.fileno(), 1)
    output.close()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for constant, value in constants.items():
        module, _, name = constant.rpartition(".")
        assert hasattr(import_module(module), name)
        setattr(import_module(module), name, value)
    sys.argv = list(line)
    sys.path[:0] = [str(ROOT / "jobs"), str(ROOT / "tools")]
    try:
        run = runpy.run_path if line[0].endswith(".py") else runpy.run_module
        run(line[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
