"""Draw the plots of a run: python jobs/plot.py --run DIR."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from hypha_ray.config.cli import run


@dataclass(frozen=True)
class Plot:
    """Draw the plots of a run, finished or not, into its folder `plots`."""

    run: Path
    """run directory, with metrics.jsonl"""


def main() -> None:
    """Draw, and print the path of every PNG."""
    arguments = tyro.cli(Plot)
    from hypha_ray.telemetry.plots import draw

    for path in draw(arguments.run):
        print(path)


if __name__ == "__main__":
    run(main)
