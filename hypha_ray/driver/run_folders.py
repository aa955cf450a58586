"""Name and folders of a job's run, and the search for a run to resume: by name, directory, or the URL of its mirror.

An unusable folder is refused with the setting that names it. Job scripts need this to parse their command
line, so heavy modules are imported late.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.load import CONFIG, require_complete
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.texts import redacted

FIX = "give the name or folder of a run, as the job `runs` lists them"
_MOST_NAMES = 5
"""Largest number of names in the remedy for a missing run."""
_FIX = "give the name or folder of a run; to begin one, leave --resume out"
_SOCKET = "ray/session_2000-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Longest path of a socket that Ray makes in its temporary folder."""
LONGEST_SOCKET = 107
"""Most bytes in the path of a Unix socket."""


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


def find_run(run: str, name: str | None, parent: str | None, fix: str = _FIX) -> Path:
    """Find a run that has begun.

    Args:
        run: name or directory of the run, or the fsspec URL of its mirror, which is copied to a local directory.
        name: name of the copy; None: that of the mirror's folder.
        parent: `run.dir` of the job.
        fix: remedy if there is no such run.

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
    return existing_run(run, parent, fix)


def no_run(name: str, parent: Path) -> CheckpointError:
    """Return the error for a run to resume that doesn't exist."""
    return missing_run(name, parent, _FIX)


def _fetch(url: str, copy: RunDirectory) -> None:
    """Copy a mirror; a new directory appears complete or not at all."""
    from hypha_ray.store.disk import publish
    from hypha_ray.store.mirror import fetch

    draft_directory = copy
    if not copy.path.exists():
        draft_directory = RunDirectory(copy.path.with_name(f".{copy.path.name}.part"))
    with draft_directory.lock():
        fetch(url, draft_directory.path)
        if not draft_directory.begun:
            problem = f"the run at {url} has no {CONFIG}"
            raise CheckpointError("CKPT001", problem, fix="is it the folder of the run itself?")
        draft_directory.count_from(_newest_attempt(draft_directory.path))
        if draft_directory != copy:
            publish(draft_directory.path, copy.path)


def _newest_attempt(directory: Path) -> int:
    """Number of the attempt that made the newest commit; 0 without commits."""
    from hypha_ray.store.commits import CommitLog
    from hypha_ray.types.rounds import attempt_of

    with suppress(CheckpointError):
        newest_commit = CommitLog(directory).newest()
        if newest_commit is not None:
            return max(attempt_of(delta.incarnation) for delta in newest_commit.deltas)
    return 0


def name_run(job: Job, kind: str) -> tuple[Job, RunDirectory]:
    """Return a complete job with the name and folder of its run, which can be written.

    Args:
        job: the job file.
        kind: beginning of the name of a run that has none.

    Raises:
        ConfigError: the job lacks a key, or a folder can't be used.

    """
    require_complete(job)
    check_places(job)
    job = with_run_name(job, kind)
    return job, RunDirectory(Path(str(job.run.dir), str(job.run.name)))


def with_run_name(job: Job, kind: str) -> Job:
    """The job with the name and folder of its run filled in."""
    name = job.run.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = job.run.model_copy(update={"name": name, "dir": str(runs(job.run.dir))})
    return job.model_copy(update={"run": run})


def check_places(job: Job) -> None:
    """Refuse folders that can't be written, and a mirror in place of the runs; no file stays behind.

    Raises:
        ConfigError: CFG008 with the wrong setting.

    """
    is_local = not os.environ.get("RAY_ADDRESS")
    if "TMPDIR" in os.environ:
        require_folder("TMPDIR", Path(os.environ["TMPDIR"]), exists=True)
    for setting, folder in _written_folders(job, is_local):
        require_folder(setting, folder)
    _refuse_mirror_in_place(job)
    if is_local:
        _require_short_sockets()


def _written_folders(job: Job, is_local: bool) -> Iterator[tuple[str, Path]]:
    """Settings in force, and the folders that they name."""
    if is_local and os.environ.get("RAY_TMPDIR"):
        yield "RAY_TMPDIR", Path(os.environ["RAY_TMPDIR"])
    token_mode = os.environ.get("RAY_AUTH_MODE") == "token"
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if is_local and token_mode and not has_token:
        token = _home() / ".ray" / "auth_token"
        if not token.exists():
            yield "HOME", token.parent
    if job.telemetry.trackers and "://" not in job.telemetry.trackers:
        yield "telemetry.trackers", Path(job.telemetry.trackers)
    if job.run.dir:
        yield "run.dir", runs(job.run.dir)
    elif os.environ.get("HYPHA_RAY_HOME"):
        yield "HYPHA_RAY_HOME", runs(None)
    else:
        yield "HOME", _home() / runs(None).name


def _refuse_mirror_in_place(job: Job) -> None:
    """Refuse a mirror that is the folder of the runs: a copy onto itself destroys the checkpoint.

    A mirror's folder that is given to ``--resume`` as a path has its job write there.
    """
    mirror = (job.checkpoint.mirror or "").removeprefix("file://").removeprefix("local://")
    if not mirror or "://" in mirror or Path(mirror).expanduser().resolve() != runs(job.run.dir).resolve():
        return
    got = f"{job.checkpoint.mirror} (it is the folder of the runs, so each run would be its own copy)"
    fix = "name another one; to go on with a mirror's copy, give --resume its URL, such as file:///mnt/mirror/texts-1"
    raise ConfigError("CFG008", "checkpoint.mirror can't be used", got, "another folder", fix)


def require_free_mirror(job: Job) -> None:
    """Refuse a new run whose mirror has one of that name, such as a lost machine's: its copies would replace it.

    Raises:
        ConfigError: RUN001, there is such a run.

    """
    mirror, name = job.checkpoint.mirror, job.run.name
    if mirror is None or name is None or RunDirectory(runs(job.run.dir) / name).begun:
        return
    from hypha_ray.store.mirror import has_run

    if has_run(mirror, name):
        url = mirror if "://" in mirror else Path(mirror).expanduser().absolute().as_uri()
        problem = f"run.name: there is a run {name!r} in checkpoint.mirror, which a new one would replace"
        fix = f"resume {redacted(url).rstrip('/')}/{name}, or choose another run.name"
        raise ConfigError("RUN001", problem, fix=fix)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise _unusable("HOME", "it isn't set", str(error)) from None


def require_folder(setting: str, folder: Path, exists: bool = False) -> None:
    """Check that files can be made in a folder, which is made later if it is missing.

    Raises:
        ConfigError: CFG008 with the setting.

    """
    existing = folder.expanduser().absolute()
    try:
        while not exists and not existing.exists() and existing.parent != existing:
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise _unusable(setting, str(folder), error.strerror or str(error)) from None


def require_replaceable(setting: str, folder: Path) -> None:
    """Refuse a folder for a model that has other files than those of an earlier export: they would be removed.

    Raises:
        ConfigError: CFG008 with the setting.

    """
    from hypha_ray.model.sources import TASK  # It loads the hub's client.

    existing = folder.expanduser()
    if not existing.is_dir() or (existing / TASK).is_file() or not any(existing.iterdir()):
        return
    got = f"{folder} (it has other files, which would be removed)"
    allowed = "a new or empty folder, or a model of an earlier run"
    raise ConfigError("CFG008", f"{setting} can't be used", got, allowed, "name another one, or one within it")


def _require_short_sockets() -> None:
    """Check that Ray's sockets can be made: their paths have a limited length."""
    for setting in ("RAY_TMPDIR", "TMPDIR"):
        if os.environ.get(setting):
            break
    else:
        return
    folder = Path(os.environ[setting])
    folder_length = len(os.fsencode(folder))
    socket = folder / _SOCKET.format(pid=os.getpid())
    socket_length = len(os.fsencode(socket))
    excess_length = socket_length - LONGEST_SOCKET
    if excess_length > 0:
        got = f"{folder_length} bytes in {folder}"
        allowed = f"{folder_length - excess_length} bytes"
        raise ConfigError("CFG008", f"{setting} is too long for Ray's sockets", got, allowed, "name a shorter one")


def _unusable(setting: str, folder: str, reason: str) -> ConfigError:
    problem = f"{setting} can't be used"
    return ConfigError("CFG008", problem, f"{folder} ({reason})", "a writable folder", f"set {setting} to one")
