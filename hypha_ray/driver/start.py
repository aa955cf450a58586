"""Start of a training job's command: its first line, then the libraries, then the job.

Job scripts import this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

from hypha_ray.config.cli.phases import Phases
from hypha_ray.config.load import Loaded
from hypha_ray.driver.interruption import interruption_of_command
from hypha_ray.driver.naming import placed
from hypha_ray.driver.own_command import own_command


def start(loaded: Loaded, kind: str) -> None:
    """Run the job of a command line, or with ``--dry-run`` only print what it would do.

    Args:
        loaded: the job of the command line.
        kind: beginning of the name of a run that has none.

    """
    phases = Phases()
    if loaded.dry_run:
        phases.begin("loading libraries")
        from hypha_ray.driver.launch import dry_run

        dry_run(loaded, phases)
        return
    job, directory = placed(loaded.job, kind)
    interruption = interruption_of_command(job, directory, has_name=loaded.job.run.name is not None)
    with interruption.reported():
        phases.begin("loading libraries")
        with interruption.ending_at_once():
            from hypha_ray.driver.launch import run_in

        run_in(loaded, (job, directory), phases, interruption, own_command())
