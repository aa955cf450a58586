"""Save what a run has learned so far, as at its end: python jobs/export.py --run NAME."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.cli.entry_point import run
from hypha_ray.config.cli.options import parse_options
from hypha_ray.errors import CheckpointError


@dataclass(frozen=True)
class Export:
    """Save the newest weights of a run that has stopped, as a folder that from_pretrained loads."""

    run: str
    """its name, its directory, or the URL of its mirror, from which it is copied here first"""
    to: Path | None = None
    """folder to write; default: model in the run directory"""


def main() -> None:
    """Find the run, and save the weights of its newest snapshot that is as it was written."""
    arguments = parse_options(Export, __doc__, sys.argv[1:])
    from hypha_ray.config.load import load
    from hypha_ray.driver.data_source import kept
    from hypha_ray.driver.find_run import find_run
    from hypha_ray.driver.launch import export_round
    from hypha_ray.driver.run_identity import committed
    from hypha_ray.store.directory import RunDirectory
    from hypha_ray.store.snapshots import newest_good

    directory = RunDirectory(find_run(arguments.run, None, None))
    job, newest = load(["@", str(directory.config)]).job, newest_good(directory.path)
    if newest is None:
        what = f"run {directory.path.name} has no checkpoint yet"
        raise CheckpointError("CKPT006", what, fix="let it train until its first commit")
    folder = arguments.to or directory.path / "model"
    export_round(job, directory, kept(job.dataset, directory).folder, newest, folder)
    print(f"after round {newest + 1} of {job.rounds.update_rounds}, {committed(directory)} are committed")
    print(f"model: {folder}")


if __name__ == "__main__":
    run(main)
