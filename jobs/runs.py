"""List the runs of a folder, the one with the newest record first: python jobs/runs.py.

    python jobs/runs.py
    python jobs/runs.py /data/runs --json runs.json
    python jobs/runs.py --tag baseline --tag long     # the runs that have both in run.tags

A run is running, finished, failed with an error, interrupted, or damaged, if its job file can't be read. Its age is the
time since its last record. The figure is that of the last evaluation, otherwise of the last round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.config.entry_point import print_notes, run, write_result
from hypha_ray.config.options import REPEATED, parse_options
from hypha_ray.errors import ConfigError

if TYPE_CHECKING:
    from hypha_ray.history.overview import RunOverview


@dataclass(frozen=True)
class Runs:
    """List the runs of a folder."""

    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""
    json: Path | None = None
    """file for the list, as JSON; -: standard output"""
    tag: list[str] = field(default_factory=list, metadata=REPEATED)
    """tag of the runs to list, one of their run.tags; of several, a run has all; default: all runs"""


def main() -> None:
    """Print a line for each run, and write the list."""
    options = parse_options(Runs, __doc__, sys.argv[1:], position="dir")
    from hypha_ray.history.overview import aligned, listing, overviews
    from hypha_ray.store.directory import runs
    from hypha_ray.texts import counted

    folder = runs(options.dir)
    if options.dir is not None and not folder.is_dir():
        raise ConfigError("CFG003", "--dir is out of range", str(folder), "a folder that exists", "name one with runs")
    all_runs, unreadable = overviews(folder)
    listed = [run for run in all_runs if set(options.tag) <= set(run.tags)]
    if options.json is not None:
        rows_json = [listed_run.as_json() for listed_run in listed]
        write_result("--json", options.json, json.dumps(rows_json, indent=1) + "\n")
    if listed:
        print(*aligned(listing(listed, time.time())), sep="\n")
    else:
        print(no_run_text(folder, options.tag, all_runs))
    if unreadable:
        print_notes([f"{counted(len(unreadable), 'folder')} of {folder} can't be read, such as {unreadable[0].name}"])


def no_run_text(folder: Path, tags: Sequence[str], all_runs: Sequence[RunOverview]) -> str:
    """Text for a list without a run, with the nearest tag if no run has one of the tags."""
    if not all_runs:
        return f"no run in {folder}"
    listed = ", ".join(map(repr, tags))
    text = f"no run in {folder} has all of the tags {listed}"
    known_tags = {tag for run in all_runs for tag in run.tags}
    for tag in tags:
        matches = get_close_matches(tag, known_tags, n=1)
        if tag not in known_tags and matches:
            text += f"; did you mean {matches[0]!r}?"
    return text


if __name__ == "__main__":
    run(main)
