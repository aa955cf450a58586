"""Draw the plots of a run: python jobs/plot.py RUN."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.entry_point import Phases, run
from hypha_ray.config.options import parse_options


@dataclass(frozen=True)
class Plot:
    """Draw the plots of a run, finished or not, into its folder `plots`."""

    run: str
    """name of the run, or its directory, with metrics.jsonl"""


def main() -> None:
    """Draw, and print the path of every PNG."""
    arguments = parse_options(Plot, __doc__, sys.argv[1:], position="run")
    phases = Phases()
    phases.begin("drawing the plots")
    from hypha_ray.driver.run_folders import find_run
    from hypha_ray.history.find import FIX
    from hypha_ray.telemetry.plots import draw

    folder = Path(arguments.run).expanduser()
    paths = draw(folder if folder.is_dir() else find_run(arguments.run, None, None, FIX))
    phases.end()
    for path in paths:
        print(path)


if __name__ == "__main__":
    run(main)
