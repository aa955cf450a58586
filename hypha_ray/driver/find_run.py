"""Search for a run to resume: by its name, its directory, or the URL of its mirror.

Job scripts need this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypha_ray.config.load import CONFIG
from hypha_ray.errors import CheckpointError
from hypha_ray.history.find import existing_run, missing_run
from hypha_ray.store.directory import RunDirectory, runs

_FIX = "give the name or folder of a run; to begin one, leave --resume out"


def find_run(run: str, name: str | None, parent: str | None) -> Path:
    """Find a run to resume.

    Args:
        run: name or directory of the run, or the fsspec URL of its mirror, which is copied to a local directory.
        name: name of the copy; None: that of the mirror's folder.
        parent: `run.dir` of the job.

    Raises:
        CheckpointError: there is no such run, or the copy's directory has another run.
        ConfigError: a driver is running it, or the copy can't be written.
        TryAgainError: the mirror can't be read.

    """
    folder = runs(parent)
    if "://" in run:
        _, _, mirror_name = run.rstrip("/").rpartition("/")
        copy = RunDirectory(folder / (name or mirror_name))
        _fetch(run, copy)
        return copy.path
    return existing_run(run, parent, _FIX)


def no_run(name: str, parent: Path) -> CheckpointError:
    """Return the error for a run to resume that doesn't exist."""
    return missing_run(name, parent, _FIX)


def _fetch(url: str, copy: RunDirectory) -> None:
    """Copy a mirror; a new directory appears complete or not at all."""
    from hypha_ray.store.disk import publish
    from hypha_ray.store.mirror import fetch

    draft = copy
    if not copy.path.exists():
        draft = RunDirectory(copy.path.with_name(f".{copy.path.name}.part"))
    with draft.lock():
        fetch(url, draft.path)
        if not draft.begun:
            problem = f"the run at {url} has no {CONFIG}"
            raise CheckpointError("CKPT001", problem, fix="is it the folder of the run itself?")
        draft.count_from(_newest_attempt(draft.path))
        if draft != copy:
            publish(draft.path, copy.path)


def _newest_attempt(directory: Path) -> int:
    """Number of the attempt that made the newest commit; 0 without commits."""
    from hypha_ray.store.commits import CommitLog
    from hypha_ray.types.rounds import attempt_of

    with suppress(CheckpointError):
        newest = CommitLog(directory).newest()
        if newest is not None:
            return max(attempt_of(delta.incarnation) for delta in newest.deltas)
    return 0
