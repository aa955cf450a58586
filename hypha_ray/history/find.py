"""Search for a run on this machine, by its name or its directory."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from hypha_ray.config.load import CONFIG
from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import RunDirectory, runs

FIX = "give the name or folder of a run, as the job `runs` lists them"
_MOST_NAMES = 5
"""Most names that the remedy for a missing run has."""


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
        if _is_run(path):
            return path.resolve() if ".." in path.parts else path
    raise missing_run(run, folder, fix)


def _is_run(path: Path) -> bool:
    """Whether a path is that of a run that has begun; no file has too long a name."""
    try:
        return RunDirectory(path).begun
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def missing_run(name: str, parent: Path, fix: str) -> CheckpointError:
    """Return the error for a run that doesn't exist; `fix` is the remedy if no run has a similar name."""
    names = sorted(path.parent.name for path in parent.glob(f"*/{CONFIG}"))
    similar = _similar_names(name, names)
    if similar:
        fix = f"did you mean {' or '.join(map(repr, similar))}?"
    problem = f"there is no run {name!r}"
    if not Path(name).is_absolute():
        problem += f" in {parent}"
    return CheckpointError("CKPT001", problem, fix=fix)


def _similar_names(name: str, names: Sequence[str]) -> list[str]:
    """Names of runs that begin with a name, otherwise the nearest one; letters may differ in case."""
    small_name = name.lower()
    longer_names: list[str] = []
    by_small_name: dict[str, str] = {}
    for known_name in names:
        by_small_name[known_name.lower()] = known_name
        if name and known_name.lower().startswith(small_name):
            longer_names.append(known_name)
    if longer_names:
        return longer_names[:_MOST_NAMES]
    nearest = get_close_matches(small_name, by_small_name, n=1)
    return list(map(by_small_name.__getitem__, nearest))
