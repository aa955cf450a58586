"""List the runs of a folder, the one with the newest record first: python jobs/runs.py.

    python jobs/runs.py
    python jobs/runs.py --dir /data/runs --json runs.json

A run is running, finished, failed with an error, interrupted, or damaged, if its job file can't be read. Its age is the
time since its last record. The figure is that of the last evaluation, otherwise of the last round.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.cli.entry_point import run
from hypha_ray.config.cli.options import parse_options
from hypha_ray.config.cli.output import print_notes, write_result
from hypha_ray.errors import ConfigError


@dataclass(frozen=True)
class Runs:
    """List the runs of a folder."""

    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""
    json: Path | None = None
    """file for the list, as JSON"""


def main() -> None:
    """Print a line for each run, and write the list."""
    options = parse_options(Runs, __doc__, sys.argv[1:])
    from hypha_ray.history.overview import TITLES, aligned, overviews, rows
    from hypha_ray.store.directory import runs
    from hypha_ray.texts import counted

    folder = runs(options.dir)
    if options.dir is not None and not folder.is_dir():
        raise ConfigError("CFG003", "--dir is out of range", str(folder), "a folder that exists", "name one with runs")
    listed, unreadable = overviews(folder)
    if options.json is not None:
        rows_json = [listed_run.as_json() for listed_run in listed]
        write_result("--json", options.json, json.dumps(rows_json, indent=1) + "\n")
    if listed:
        print(*aligned([TITLES, *rows(listed, time.time())]), sep="\n")
    else:
        print(f"no run in {folder}")
    if unreadable:
        print_notes([f"{counted(len(unreadable), 'folder')} of {folder} can't be read, such as {unreadable[0].name}"])


if __name__ == "__main__":
    run(main)
