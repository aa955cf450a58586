"""Name and folders of a job's run; an unusable folder is refused with the setting that names it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.load import require_complete
from hypha_ray.errors import ConfigError
from hypha_ray.store.directory import RunDirectory, runs


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


_SOCKET = "ray/session_2000-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Longest path of a socket that Ray makes in its temporary folder."""
LONGEST_SOCKET = 107
"""Most bytes in the path of a Unix socket."""


def check_places(job: Job) -> None:
    """Refuse folders that can't be written; no file stays behind.

    Raises:
        ConfigError: CFG008 with the wrong setting.

    """
    local = not os.environ.get("RAY_ADDRESS")
    if "TMPDIR" in os.environ:
        require_folder("TMPDIR", Path(os.environ["TMPDIR"]), exists=True)
    for setting, folder in _written_folders(job, local):
        require_folder(setting, folder)
    if local:
        _require_short_sockets()


def _written_folders(job: Job, local: bool) -> Iterator[tuple[str, Path]]:
    """Settings in force, and the folders that they name."""
    if local and os.environ.get("RAY_TMPDIR"):
        yield "RAY_TMPDIR", Path(os.environ["RAY_TMPDIR"])
    token_mode = os.environ.get("RAY_AUTH_MODE") == "token"
    has_token = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if local and token_mode and not has_token:
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
    excess = socket_length - LONGEST_SOCKET
    if excess > 0:
        got = f"{folder_length} bytes in {folder}"
        allowed = f"{folder_length - excess} bytes"
        raise ConfigError("CFG008", f"{setting} is too long for Ray's sockets", got, allowed, "name a shorter one")


def _unusable(setting: str, folder: str, reason: str) -> ConfigError:
    problem = f"{setting} can't be used"
    return ConfigError("CFG008", problem, f"{folder} ({reason})", "a writable folder", f"set {setting} to one")
