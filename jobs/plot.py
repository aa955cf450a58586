"""Draw the plots of a run: python jobs/plot.py --run DIR."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.cli.entry_point import run
from hypha_ray.config.cli.options import parse_options


@dataclass(frozen=True)
class Plot:
    """Draw the plots of a run, finished or not, into its folder `plots`."""

    run: Path
    """run directory, with metrics.jsonl"""


def main() -> None:
    """Draw, and print the path of every PNG."""
    arguments = parse_options(Plot, __doc__, sys.argv[1:])
    from hypha_ray.telemetry.plots import draw

    for path in draw(arguments.run):
        print(path)


if __name__ == "__main__":
    run(main)
