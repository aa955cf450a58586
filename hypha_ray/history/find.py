"""Search for a run on this machine, by its name or its directory."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from hypha_ray.config.load import CONFIG
from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import RunDirectory, runs

FIX = "give the name or folder of a run, as the job `runs` lists them"


def existing_run(run: str, parent: str | None, fix: str = FIX) -> Path:
    """Find a run that has begun.

    Args:
        run: name or directory of the run.
        parent: folder of the runs, as `run.dir`; None: the default one.
        fix: the remedy if no run has a similar name.

    Raises:
        CheckpointError: CKPT001, there is no such run.

    """
    folder = runs(parent)
    for path in (folder / run, Path(run).expanduser().absolute()):
        if RunDirectory(path).begun:
            return path.resolve() if ".." in path.parts else path
    raise missing_run(run, folder, fix)


def missing_run(name: str, parent: Path, fix: str) -> CheckpointError:
    """Return the error for a run that doesn't exist; `fix` is the remedy if no run has a similar name."""
    names = sorted(path.parent.name for path in parent.glob(f"*/{CONFIG}"))
    similar = get_close_matches(name, names, n=1)
    if similar:
        fix = f"did you mean {similar[0]!r}?"
    return CheckpointError("CKPT001", f"there is no run {name!r} in {parent}", fix=fix)
