"""Show one run in ten lines, with the command that goes on: python jobs/show.py RUN.

python jobs/show.py texts-1
python jobs/show.py --run /data/runs/texts-1
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hypha_ray.config.entry_point import run
from hypha_ray.config.options import parse_options


@dataclass(frozen=True)
class Show:
    """Show one run."""

    run: str
    """name of the run, or its directory"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""


def main() -> None:
    """Print the account of the run."""
    options = parse_options(Show, __doc__, sys.argv[1:], position="run")
    from hypha_ray.driver.run_folders import existing_run
    from hypha_ray.history.account import account_of

    print(*account_of(existing_run(options.run, options.dir)), sep="\n")


if __name__ == "__main__":
    run(main)
