"""Start of a training job's command: its first line, then the libraries, then the job.

Job scripts import this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType

from hypha_ray.config import Job
from hypha_ray.config.cli.output import Phases, print_notes
from hypha_ray.config.load import Loaded, require_secrets, resolved_toml
from hypha_ray.driver.interruption import interruption_of_command, own_command
from hypha_ray.driver.local_ray.service import RayService
from hypha_ray.driver.run_folders import check_places, name_run
from hypha_ray.errors import HyphaError
from hypha_ray.store.directory import RunDirectory, runs


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
