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


def placed(job: Job, kind: str) -> tuple[Job, RunDirectory]:
    """Return a complete job with the name and folder of its run, which can be written.

    Args:
        job: the job file.
        kind: beginning of the name of a run that has none.

    Raises:
        ConfigError: the job lacks a key, or a folder can't be used.

    """
    require_complete(job)
    check_places(job)
    job = named(job, kind)
    return job, RunDirectory(Path(str(job.run.dir), str(job.run.name)))


def named(job: Job, kind: str) -> Job:
    """The job with the name and folder of its run filled in."""
    name = job.run.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    return job.model_copy(update={"run": job.run.model_copy(update={"name": name, "dir": str(runs(job.run.dir))})})


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
        _require("TMPDIR", Path(os.environ["TMPDIR"]), exists=True)
    for name, place in _to_be_written(job, local):
        _require(name, place)
    if local:
        _require_short()


def _to_be_written(job: Job, local: bool) -> Iterator[tuple[str, Path]]:
    """Settings in force, and the folders that they name."""
    if local and os.environ.get("RAY_TMPDIR"):
        yield "RAY_TMPDIR", Path(os.environ["RAY_TMPDIR"])
    token_mode = os.environ.get("RAY_AUTH_MODE") == "token"
    if local and token_mode and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
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


def _require(name: str, place: Path, exists: bool = False) -> None:
    """Check that files can be made in a folder, which is made if it is missing."""
    there = place.expanduser().absolute()
    try:
        while not exists and not there.exists() and there.parent != there:
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise _unusable(name, str(place), error.strerror or str(error)) from None


def _require_short() -> None:
    """Check that Ray's sockets can be made: their paths have a limited length."""
    name = next((name for name in ("RAY_TMPDIR", "TMPDIR") if os.environ.get(name)), None)
    if name is None:
        return
    folder = Path(os.environ[name])
    length = len(os.fsencode(folder / _SOCKET.format(pid=os.getpid())))
    if length > LONGEST_SOCKET:
        room = len(os.fsencode(folder)) - (length - LONGEST_SOCKET)
        got = f"{len(os.fsencode(folder))} bytes in {folder}"
        allowed = f"{room} bytes"
        raise ConfigError("CFG008", f"{name} is too long for Ray's sockets", got, allowed, "name a shorter one")


def _unusable(name: str, place: str, why: str) -> ConfigError:
    return ConfigError("CFG008", f"{name} can't be used", f"{place} ({why})", "a writable folder", f"set {name} to one")
