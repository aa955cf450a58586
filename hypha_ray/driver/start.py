"""Start of a training job's command: its first line, then the libraries, then the job.

Job scripts import this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, closing

from hypha_ray.config import Job
from hypha_ray.config.cli.phases import Phases
from hypha_ray.config.load import Loaded
from hypha_ray.driver.interruption import interruption_of_command
from hypha_ray.driver.local_ray.service import RayService
from hypha_ray.driver.naming import placed
from hypha_ray.driver.own_command import own_command
from hypha_ray.store.directory import RunDirectory


def start(loaded: Loaded, kind: str) -> None:
    """Run the job of a command line, or with ``--dry-run`` only print what it would do.

    Args:
        loaded: the job of the command line.
        kind: beginning of the name of a run that has none.

    """
    phases = Phases()
    if loaded.dry_run:
        with ExitStack() as held:
            service = held.enter_context(closing(RayService(forks=False))) if _starts_ray() else None
            phases.begin("loading libraries")
            from hypha_ray.driver.launch import dry_run

            dry_run(loaded, phases, service)
        return
    job, directory = placed(loaded.job, kind)
    interruption = interruption_of_command(job, directory, has_name=loaded.job.run.name is not None)
    with ExitStack() as held, interruption.reported():
        phases.begin("loading libraries")
        service = held.enter_context(closing(RayService())) if _needs_own_ray(job, directory) else None
        with interruption.ending_at_once():
            from hypha_ray.driver.launch import run_in

        run_in(loaded, (job, directory), phases, interruption, own_command(), service)


def _needs_own_ray(job: Job, directory: RunDirectory) -> bool:
    """Whether a job is to start Ray on this machine, as far as can be told without libraries."""
    return _starts_ray() and len(list(directory.path.glob("commits/round_*.json"))) < job.rounds.update_rounds


def _starts_ray() -> bool:
    """Whether a command that needs Ray starts it, in processes that Linux ends with this one."""
    return not os.environ.get("RAY_ADDRESS") and sys.platform == "linux"
