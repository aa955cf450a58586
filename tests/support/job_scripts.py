"""Jobs as a user runs them, in processes of their own, and a look at what they leave behind."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.forked_process import ROOT, ForkedProcess

Done = subprocess.CompletedProcess[str]
ALONE = {"RAY_ADDRESS": ""}
"""Variables of a job that starts a Ray of its own, whatever cluster is there."""
PHASE = re.compile(r"\[ *\d+\.\ds\] ")
"""Beginning of a line that says what a job does."""
TRAINERS = ("diloco", "grpo", "ppo", "rerun", "sync")
"""Scripts whose runs have plots in the end, which take as long as the training of a small model."""
PATIENCE_S = 60.0
"""Longest wait for processes that are about to end, on the busiest machine."""


def started_with(folder: Path) -> list[int]:
    """Processes of a job and its Ray: with this folder as RAY_TMPDIR in their environment.

    A forked worker is known by its log files, since /proc shows the environment of a process's first program only. The
    process that tests may have such files too, if it was a driver.
    """
    mark, found = f"RAY_TMPDIR={folder}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            has_mark = mark in (process / "environ").read_bytes()
            if has_mark or any(folder in file.parents for file in open_files(process)):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def open_files(process: Path) -> Iterator[Path]:
    """Files that a process of /proc has open."""
    for descriptor in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield descriptor.readlink()


def said(errors: str) -> str:
    """Standard error without the lines that say what a job does."""
    return "".join(line for line in errors.splitlines(keepends=True) if not PHASE.match(line))


def left_behind(folder: Path) -> list[str]:
    """Command lines of those of them that don't end by themselves."""
    for pid in started_with(folder):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], PATIENCE_S)
            os.close(descriptor)
    lines = []
    for pid in started_with(folder):
        with suppress(OSError):
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return lines


class Jobs:
    """Runs job scripts. Every run is checked to leave no process behind.

    `stderr` lacks the lines that say what a job does, as they depend on the machine; those of `start` have them.

    Args:
        home: what they get as HYPHA_RAY_HOME.
        folder: what they get as RAY_TMPDIR; short, since Ray puts sockets there.
        place: where they run, which has the folder jobs/.
        address: of the cluster that they join; "": each starts a Ray of its own, see `ALONE`.
        plots: whether runs draw what they do by default; otherwise only where their flags ask for it.

    """

    def __init__(self, home: Path, folder: Path, place: Path, address: str, plots: bool) -> None:
        self.home, self._folder, self._place, self._address, self._plots = home, folder, place, address, plots
        self._forked: list[ForkedProcess] = []

    def __call__(self, *arguments: str | Path, script: str = "diloco", env: dict[str, str] | None = None) -> Done:
        process = self.start(*arguments, script=script, env=env)
        output, errors = process.communicate(timeout=240)
        self.require_none_left()
        assert process.returncode is not None
        return Done(process.args, process.returncode, output, said(errors))

    def start(
        self,
        *arguments: str | Path,
        script: str = "diloco",
        env: dict[str, str] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> ForkedProcess | subprocess.Popen[str]:
        """Run a script, and leave it to the caller to wait for it.

        One with variables that libraries read as they are loaded has an interpreter of its own, and no constants.
        """
        own = {**self.variables, "RAY_ADDRESS": self._address}
        words, environment = [*map(str, arguments)], os.environ | own | (env or {})
        if script in TRAINERS and not self._plots and "--telemetry.plots" not in words:
            words += ["--telemetry.plots", "false"]
        if not any(name.startswith(("HF_", "RAY_")) for name in (env or {}).keys() - {"HF_TOKEN", "RAY_ADDRESS"}):
            self._forked.append(ForkedProcess([f"jobs/{script}.py", *words], environment, self._place, constants))
            return self._forked[-1]
        command, pipe = [sys.executable, f"jobs/{script}.py", *words], subprocess.PIPE
        return subprocess.Popen(command, cwd=self._place, env=environment, stdout=pipe, stderr=pipe, text=True)

    @property
    def variables(self) -> dict[str, str]:
        """Those that lead a command to the folders of these jobs."""
        return {"HYPHA_RAY_HOME": str(self.home), "RAY_TMPDIR": str(self._folder)}

    def require_none_left(self) -> None:
        """Wait for the end of all that they have started."""
        assert left_behind(self._folder) == []

    def processes(self) -> list[int]:
        """All that they have started, and that still runs."""
        return started_with(self._folder)

    def kill(self) -> None:
        """Kill what still runs."""
        for job in self._forked:
            job.kill()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def jobs_in(home: Path, place: Path = ROOT, address: str = "", plots: bool = False) -> Iterator[Jobs]:
    """`Jobs` for a while; what still runs at the end is killed."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    jobs = Jobs(home, folder, place, address, plots)
    try:
        yield jobs
    finally:
        jobs.kill()
        shutil.rmtree(folder, ignore_errors=True)
