"""Search for a run to resume: by its name, its directory, or the URL of its mirror.

Job scripts need this to parse their command line, so heavy modules are imported late.
"""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from hypha_ray.config.load import CONFIG
from hypha_ray.errors import CheckpointError
from hypha_ray.store.directory import RunDirectory, runs


def find_run(wanted: str, name: str | None, parent: str | None) -> Path:
    """Find a run to resume.

    Args:
        wanted: name or directory of the run, or the fsspec URL of its mirror, which is copied to a local directory.
        name: name of the copy; None: that of the mirror's folder.
        parent: `run.dir` of the job.

    Raises:
        CheckpointError: there is no such run, or another run is where the copy would go.
        ConfigError: a driver is running it, or the copy can't be written.
        TryAgainError: the mirror can't be read.

    """
    folder = runs(parent)
    if "://" in wanted:
        copy = RunDirectory(folder / (name or wanted.rstrip("/").rpartition("/")[2]))
        _fetch(wanted, copy)
        return copy.path
    places = (folder / wanted, Path(wanted).expanduser().absolute())
    found = next((place for place in places if RunDirectory(place).begun), None)
    if found is None:
        raise no_run(wanted, folder)
    return found.resolve() if ".." in found.parts else found


def no_run(name: str, parent: Path) -> CheckpointError:
    """Raise the error for a run that doesn't exist."""
    known = sorted(path.parent.name for path in parent.glob(f"*/{CONFIG}"))
    near = get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]!r}?" if near else "give the name or folder of a run; to begin one, leave --resume out"
    return CheckpointError("CKPT001", f"there is no run {name!r} in {parent}", fix=fix)


def _fetch(url: str, copy: RunDirectory) -> None:
    """Copy a mirror; a new directory appears complete or not at all."""
    from hypha_ray.store.disk import publish
    from hypha_ray.store.mirror import fetch

    draft = copy if copy.path.exists() else RunDirectory(copy.path.with_name(f".{copy.path.name}.part"))
    with draft.lock():
        fetch(url, draft.path)
        if not draft.begun:
            raise CheckpointError(
                "CKPT001", f"the run at {url} has no {CONFIG}", fix="is it the folder of the run itself?"
            )
        draft.count_from(_attempt_of(draft.path))
        if draft != copy:
            publish(draft.path, copy.path)


def _attempt_of(directory: Path) -> int:
    """Number of the attempt that made the newest commit."""
    from hypha_ray.scheduler.fleet.roster import STARTS_PER_ATTEMPT
    from hypha_ray.store.commits import CommitLog

    with suppress(CheckpointError):
        newest = CommitLog(directory).newest()
        return max(delta.incarnation // STARTS_PER_ATTEMPT for delta in newest.deltas) if newest else 0
    return 0
