"""Save what a run has learned so far, as at its end, or after any round that has a snapshot.

python jobs/export.py --run NAME
python jobs/export.py --run NAME --round 12 --to models/round-12
python jobs/export.py --run NAME --dtype bfloat16 --to models/small
python jobs/export.py --run NAME --compatible 4 --to models/older
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hypha_ray.config.entry_point import Phases, run
from hypha_ray.config.options import parse_options, require_round
from hypha_ray.driver.run_folders import find_run, require_folder, require_replaceable


@dataclass(frozen=True)
class Export:
    """Save weights of a run that has stopped as a folder that from_pretrained loads."""

    run: str
    """its name, its directory, or the URL of its mirror, from which it is copied here first"""
    round: int | None = None
    """round that has a snapshot, counted from 1 as on the console; default: the newest"""
    to: Path | None = None
    """folder to write; default: model in the run directory"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of the weights; default: that of the job, checkpoint.export_dtype, or of its repository"""
    compatible: Literal["4"] | None = None
    """release of transformers that reads the folder, too; without it, 4 takes other settings of positions silently"""
    dir: str | None = None
    """folder of the runs, as run.dir; default: $HYPHA_RAY_HOME or ~/hypha_ray"""


def main() -> None:
    """Find the run, and save the weights of a snapshot that is as it was written."""
    arguments = parse_options(Export, __doc__, sys.argv[1:], position="run")
    require_round(arguments.round)
    if arguments.to is not None:
        require_folder("--to", arguments.to)
        require_replaceable("--to", arguments.to)
    phases = Phases()
    phases.begin("reading the run")
    from hypha_ray.driver.evaluation import save_snapshot
    from hypha_ray.driver.run import Run
    from hypha_ray.driver.run_folders import FIX

    trained_run = Run(find_run(arguments.run, None, arguments.dir, FIX))
    number = trained_run.newest_snapshot if arguments.round is None else arguments.round - 1
    phases.begin("saving the model")
    release = None if arguments.compatible is None else int(arguments.compatible)
    folder = trained_run.model if arguments.to is None else arguments.to.expanduser()
    save_snapshot(trained_run, folder, number, release, arguments.dtype)
    phases.end()
    rounds = trained_run.job.rounds
    of_all = f" of {rounds.update_rounds}" if rounds.counted else ""
    print(f"after round {number + 1}{of_all}, {trained_run.committed_rounds} are committed")
    print(f"model: {folder}")


if __name__ == "__main__":
    run(main)
