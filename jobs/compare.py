"""Compare runs: the settings that differ, figures side by side, and one plot with their curves.

    python jobs/compare.py texts-1 texts-2
    python jobs/compare.py --run texts-1 --run texts-2 --out comparison.html    # one page with the curves inside
    python jobs/compare.py texts-1 texts-2 --out curves.png                     # the plot alone

Settings are those of the runs' config.toml, with all defaults.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.config.entry_point import run, write_result
from hypha_ray.config.options import REPEATED, parse_options
from hypha_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from hypha_ray.history.comparison import Comparison

SUFFIXES = (".html", ".png")
"""Ends of the names of files that a comparison is written to."""


@dataclass(frozen=True)
class Compare:
    """Compare runs."""

    run: list[str] = field(default_factory=list, metadata=REPEATED)
    """names of the runs, or their directories; two or more"""
    out: Path | None = None
    """file for a page, if it ends in .html, or for the plot, if it ends in .png; default: none is written"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""


def main() -> None:
    """Print the comparison, and write the page or the plot."""
    options = parse_options(Compare, __doc__, sys.argv[1:], position="run")
    if len(options.run) < 2:
        raise ConfigError("CFG012", "--run is missing", f"{len(options.run)}", "two runs or more", "name the runs")
    if options.out is not None and options.out.suffix not in SUFFIXES:
        raise ConfigError("CFG003", "--out is out of range", str(options.out), "a name in .html or .png", "name one")
    from hypha_ray.driver.run_folders import existing_run
    from hypha_ray.history.comparison import compared
    from hypha_ray.history.overview import aligned

    comparison = compared([existing_run(name, options.dir) for name in options.run])
    if comparison.settings:
        print(*aligned([("setting", *comparison.names), *comparison.settings]), sep="\n")
    else:
        print("no setting differs")
    print()
    print(*aligned([("figure", *comparison.names), *comparison.figures]), sep="\n")
    if options.out is not None:
        write(comparison, options.out)
        print(f"\n{options.out.absolute()}")


def write(comparison: Comparison, file: Path) -> None:
    """Write the page, or the plot alone.

    Raises:
        ConfigError: CFG008, the file can't be written.
        DataError: DATA044, there is no round to plot.

    """
    from hypha_ray.history.comparison import page, picture_of

    if file.suffix == ".html":
        write_result("--out", file, page(comparison))
        return
    picture = picture_of(comparison)
    if picture is None:
        problem = f"none of {', '.join(comparison.names)} has a round to plot"
        raise DataError("DATA044", problem, fix="name runs that have finished a round, or a page by --out FILE.html")
    write_result("--out", file, picture)


if __name__ == "__main__":
    run(main)
