"""Start the job of a run again, under a new name: python jobs/rerun.py RUN.

    python jobs/rerun.py texts-1
    python jobs/rerun.py texts-1 --dry-run
    python jobs/rerun.py texts-1 --run.name texts-2 --inner_optimizer.learning_rate 8e-4
    python jobs/rerun.py --run /data/runs/texts-1 --anyway

Its job file is the config.toml of the run, over which further job files and keys win, as in jobs/diloco.py. It runs in
the folder that the run was started in, if that is there. Whatever has changed since then is named, and refused without
--anyway: the commit, files of the checkout, versions of libraries, data, weights, plug-ins, secrets that aren't set.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hypha_ray.config.entry_point import run
from hypha_ray.config.options import parse_options
from hypha_ray.driver.rerun import rerun, split_words


@dataclass(frozen=True)
class Rerun:
    """Start the job of a run again."""

    run: str
    """name of the run, or its directory"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""
    anyway: bool = False
    """start even if something has changed"""
    dry_run: bool = False
    """only make the checks of a start, and print the summary and the resolved job file"""


def main() -> None:
    """Parse first, import later: `--help` and a mistyped flag answer at once."""
    own_words, job_words = split_words(sys.argv[1:], Rerun)
    options = parse_options(Rerun, __doc__, own_words, position="run")
    from hypha_ray.driver.run_folders import existing_run

    rerun(existing_run(options.run, options.dir), job_words, options.anyway, options.dry_run)


if __name__ == "__main__":
    run(main)
