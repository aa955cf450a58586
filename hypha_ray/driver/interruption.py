"""Report of an interrupted job: how far its run is, where it is, and the command that resumes it."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.cli.entry_point import INTERRUPTED
from hypha_ray.store.directory import RunDirectory
from hypha_ray.texts import redacted


def program() -> list[str]:
    """Return the words before the arguments with which this process was started."""
    script = sys.argv[0]
    words = sys.orig_argv
    if len(words) > 1 and Path(words[1]).name == "hypha-ray":
        return ["hypha-ray", Path(script).stem]
    if words[1:3] == ["-m", "hypha_ray"]:
        return [words[0], "-m", "hypha_ray", Path(script).stem]
    return [words[0], script]


def own_command() -> list[str]:
    """Return the command that started this job script, as a user types it, without the secrets of URLs."""
    return [*program(), *map(redacted, sys.argv[1:])]


TERMINATED = 143
"""Exit status after SIGTERM."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job."""


class InterruptionReport:
    """Reports once that a job was interrupted, by Ctrl-C or SIGTERM.

    Args:
        job: the job, with `run.name` set.
        directory: the run directory, which may not exist yet.
        command: the command that starts the run again; empty without one.
        resume: the command that resumes the run once it has begun; default: `command`.

    """

    def __init__(
        self, job: Job, directory: RunDirectory, command: Sequence[str] = (), resume: Sequence[str] | None = None
    ) -> None:
        self.rounds = job.rounds.update_rounds if job.rounds.counted else None
        """Number of rounds of the run; None until the dataset tells it."""
        self._directory = directory
        self._command = command
        self._resume = command if resume is None else resume
        self._is_reported = False

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Report an interruption of the code inside, unless it was reported already."""
        try:
            yield
        except KeyboardInterrupt:
            self._report()
            raise
        except SystemExit as end:
            if end.code == TERMINATED:
                self._report()
            raise

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Report a signal and end the process, while libraries are loaded.

        An exception could be lost there: libraries go on without modules that they fail to load.
        """
        early_signals: list[int] = []
        """Signals that came before the report could be made."""
        old_handlers = {
            number: signal.signal(number, lambda number, _: early_signals.append(number)) for number in ENDING
        }
        try:
            # The report needs these modules, so they are loaded before anything can be half loaded.
            import hypha_ray.store.commits
            import hypha_ray.store.restore_point  # noqa: F401

            for number in ENDING:
                signal.signal(number, self._end)
            if early_signals:
                self._end(early_signals[0], None)
            yield
        finally:
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _end(self, number: int, _: object) -> None:
        """Report a signal and end the process."""
        self._report()
        os._exit(TERMINATED if number == signal.SIGTERM else INTERRUPTED)

    def _report(self) -> None:
        if self._is_reported:
            return
        print(self.text(), file=sys.stderr, flush=True)
        print(f"run: {self._directory.path}", flush=True)
        self._is_reported = True  # Only now: a second Ctrl-C may have cut an earlier report off.

    def text(self) -> str:
        """Return the progress of the run, and the command that resumes it."""
        from hypha_ray.store.commits import CommitLog
        from hypha_ray.store.restore_point import usable_rounds

        committed = max(CommitLog(self._directory.path).rounds(), default=-1) + 1
        usable = usable_rounds(self._directory.path)
        if not committed:
            text = "stopped before the first commit: nothing is committed yet"
        else:
            text = f"stopped after round {committed}"
            if self.rounds is not None and committed <= self.rounds:
                text += f" of {self.rounds}"
            if usable != committed:
                text += f"; the newest checkpoint is that of round {usable}"
        command = self._resume if self._directory.begun else self._command
        if command:
            text += f"; go on with: {redacted(shlex.join(command))}"
        return text


def interruption_of_command(job: Job, directory: RunDirectory, has_name: bool) -> InterruptionReport:
    """Report for this process's command line; the name of a run without one was made at its start.

    From now on SIGTERM ends this process by an exception, as Ctrl-C does.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    command = [*program(), *sys.argv[1:]]
    resume = command if has_name else [*program(), "--resume", str(directory.path)]
    return InterruptionReport(job, directory, command, resume)
