"""Start of a training job's command: first line, libraries, job, and the report of an interruption.

Job scripts import this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType

from hypha_ray.config import Job
from hypha_ray.config.entry_point import INTERRUPTED, Phases, print_notes
from hypha_ray.config.load import Loaded, require_secrets, resolved_toml
from hypha_ray.driver.local_ray.service import RayService
from hypha_ray.driver.run_folders import check_places, name_run
from hypha_ray.errors import HyphaError
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.texts import redacted

TERMINATED = 143
"""Exit status after SIGTERM."""
ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a job."""


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


def start(loaded: Loaded, kind: str) -> None:
    """Run the job of a command line, or with ``--dry-run`` only print what it would do.

    Args:
        loaded: the job of the command line.
        kind: beginning of the name of a run that has none.

    """
    phases = Phases()
    print_notes(loaded.notes)
    if loaded.dry_run:
        _dry_run(loaded, phases)
        return
    job, directory = name_run(loaded.job, kind)
    interruption = interruption_of_command(job, directory, has_name=loaded.job.run.name is not None)
    with ExitStack() as stack, interruption.reported():
        phases.begin("checking the settings")
        from hypha_ray.driver.preflight.settings import check_early

        check_early(job, directory, loaded.resume)
        phases.begin("loading libraries")
        service = None
        if _needs_own_ray(job, directory):
            service = stack.enter_context(closing(RayService()))
        with interruption.ending_at_once():
            from hypha_ray.driver.launch import run_in

        run_in(loaded, (job, directory), phases, interruption, own_command(), service)


def _dry_run(loaded: Loaded, phases: Phases) -> None:
    """Run the checks of a start, and print the summary and the resolved job file; that also if a check fails."""
    job = loaded.job
    job_file = _JobFile(resolved_toml(job))
    phases.begin("checking the settings")
    from hypha_ray.driver.preflight.settings import check_early

    with ExitStack() as stack:
        stack.enter_context(job_file)
        require_secrets(job)
        check_places(job)
        directory = None if job.run.name is None else RunDirectory(runs(job.run.dir) / job.run.name)
        check_early(job, directory, loaded.resume)
        service = None
        if _starts_ray():
            service = stack.enter_context(closing(RayService(forks=False)))
        phases.begin("loading libraries")
        from hypha_ray.driver.launch import dry_run

        dry_run(loaded, phases, service, job_file.print)


class _JobFile:
    """A resolved job file that is printed once: with its summary, or without one if an error comes first.

    Args:
        text: the job file.

    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._is_printed = False

    def __enter__(self) -> _JobFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, HyphaError):
            self.print("")

    def print(self, summary: str) -> None:
        """Print the summary, each line as a comment of the job file, and then the job file."""
        if self._is_printed:
            return
        self._is_printed = True
        for line in summary.splitlines():
            print(f"# {line}")
        if summary:
            print()
        print(self._text, flush=True)


def _needs_own_ray(job: Job, directory: RunDirectory) -> bool:
    """Whether a job is to start Ray on this machine, as far as is known without libraries."""
    if not _starts_ray():
        return False
    commits = sorted(directory.path.glob("commits/round_*.json"))
    if job.rounds.counted:
        return len(commits) < job.rounds.update_rounds
    return job.dataset.mix != [] or not commits or epoch_of(commits[-1]) < (job.rounds.epochs or 0)


def epoch_of(record: Path) -> int:
    """The oldest epoch that isn't complete after a commit; 0 if its record is damaged."""
    try:
        return int(json.loads(record.read_bytes())["epoch"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _starts_ray() -> bool:
    """Whether a command that needs Ray starts it, in processes that Linux ends with this one."""
    return not os.environ.get("RAY_ADDRESS") and sys.platform == "linux"
