"""Draw the plots of a run: python jobs/plot.py RUN."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.entry_point import Phases, run
from hypha_ray.config.options import parse_options
from hypha_ray.errors import CheckpointError


@dataclass(frozen=True)
class Plot:
    """Draw the plots of a run, finished or not, into its folder `plots`."""

    run: str
    """name of the run, or its directory, with metrics.jsonl"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""


def main() -> None:
    """Draw, and print the path of every PNG."""
    arguments = parse_options(Plot, __doc__, sys.argv[1:], position="run")
    phases = Phases()
    phases.begin("drawing the plots")
    from hypha_ray.telemetry.plots import draw

    paths = draw(run_or_folder(arguments.run, arguments.dir))
    phases.end()
    for path in paths:
        print(path)


def run_or_folder(name: str, parent: str | None) -> Path:
    """Return the directory of a run, otherwise a folder that lacks all but the records.

    Raises:
        CheckpointError: CKPT001, there is neither.

    """
    from hypha_ray.driver.run_folders import FIX, find_run

    try:
        return find_run(name, None, parent, FIX)
    except CheckpointError:
        folder = Path(name).expanduser()
        with suppress(OSError):  # No file has too long a name.
            if folder.is_dir():
                return folder
        raise


if __name__ == "__main__":
    run(main)
