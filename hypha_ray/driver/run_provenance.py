"""Account of how a run was made: the file ``provenance.json`` of its directory.

Its fields are those of the last start; `earlier` has those of the starts before, each with the devices of its workers.
Users of the machine can be named here: the file is private, as the whole run directory is.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypha_ray
from hypha_ray.data.storage import Place
from hypha_ray.data.url_folder import is_url
from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.history.overview import PROVENANCE
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import EVENTS, read_json, read_jsonl
from hypha_ray.texts import redacted

if TYPE_CHECKING:
    from hypha_ray.driver.datasets.data_source import DataSource

PACKAGES = (
    "ray",
    "torch",
    "transformers",
    "safetensors",
    "peft",
    "datasets",
    "numpy",
    "numba",
    "bitsandbytes",
    "fsspec",
    "protobuf",
)
"""Packages whose versions may change the results of a run; missing ones are left out."""
CHECKOUT = Path(hypha_ray.__file__).parents[1]
"""Folder that has the package: a checkout, unless the package is installed."""
_GIT_S = 10.0
"""Longest time for an answer of git."""


def record_start(
    directory: RunDirectory,
    source: DataSource,
    command: Sequence[str] | None,
    nodes: Sequence[Mapping[str, Any]],
    secrets: Sequence[str] = (),
) -> None:
    """Write the account of a start over that of the start before, which becomes the last one of `earlier`.

    Args:
        directory: the run directory.
        source: the dataset.
        command: the command; None if a program called `hypha_ray.train`.
        nodes: nodes of the cluster, as `ray.nodes` has them.
        secrets: names of the environment variables that have credentials of the job.

    Raises:
        ConfigError: the folder can't be written.

    """
    record_devices(directory)
    last_start = read_json(directory.path / PROVENANCE)
    earlier = []
    if last_start:
        earlier = [*last_start.pop("earlier", []), last_start]
    _write(directory, {**_start(source, command, nodes), "secrets": list(secrets), "earlier": earlier})


def record_devices(directory: RunDirectory) -> None:
    """Add the devices and settings of all workers that have joined since the last start, by their events.

    A folder that can't be written is ignored: a run doesn't end because of its account.
    """
    account = read_json(directory.path / PROVENANCE)
    if not account:
        return
    start_time = str(account.get("wall_time", ""))
    joins = read_jsonl(directory.path / EVENTS, ["join"])
    joins = [event for event in joins if event.get("wall_time", "") >= start_time]
    devices = {}
    settings = {}
    reasons = {}
    for event in sorted(joins, key=lambda event: int(event["worker"])):
        worker = f"worker-{event['worker']}"
        devices[worker] = event.get("device")
        if "settings" in event:
            settings[worker] = event["settings"]
            reasons[worker] = event.get("reasons", {})
    account |= {"devices": devices, "settings": settings, "reasons": reasons}
    with suppress(ConfigError):
        _write(directory, account)


@contextmanager
def recorded_error(directory: RunDirectory) -> Iterator[None]:
    """Context of a part of the run, whose error becomes that of the last start; there is none if the part ends well.

    An interruption is no error. A folder that can't be written is ignored, as by `record_devices`.
    """
    try:
        yield
    except Exception as error:
        cause = getattr(error, "cause", error)
        text = str(cause) if isinstance(cause, HyphaError) else redacted(reason_of(error))
        _record_error(directory, text)
        raise
    _record_error(directory, None)


def _record_error(directory: RunDirectory, text: str | None) -> None:
    account = read_json(directory.path / PROVENANCE)
    if account and account.get("error") != text:
        with suppress(ConfigError):
            _write(directory, {**account, "error": text})


def _start(source: DataSource, command: Sequence[str] | None, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    folder = Path.cwd()
    return {
        "wall_time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "command": None if command is None else list(command),
        "folder": str(folder),
        "user": _user(),
        "host": socket.gethostname(),
        "versions": versions(),
        **commit_of(CHECKOUT),
        "working_folder": None if folder == CHECKOUT else commit_of(folder),
        "hosts": [_host(node) for node in nodes if node.get("Alive")],
        "devices": {},
        "settings": {},
        "reasons": {},
        "error": None,
        "dataset": _dataset(source),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of hypha_ray and of the packages below it, and the platform."""
    versions = {
        "python": platform.python_version(),
        "hypha_ray": hypha_ray.__version__,
        "platform": platform.platform(),
    }
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def commit_of(folder: Path) -> dict[str, Any]:
    """Return the commit of a folder that is a git checkout, and whether files of it have changed; None otherwise."""
    if not (folder / ".git").exists():
        return {"commit": None, "uncommitted_changes": None}
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "uncommitted_changes": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git; None if git is missing or fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container may run under a number that has no name.
        return None


def _host(node: Mapping[str, Any]) -> dict[str, Any]:
    resources: Mapping[str, float] = node.get("Resources", {})
    prefix = "accelerator_type:"
    gpu_types = [name.removeprefix(prefix) for name in resources if name.startswith(prefix)]
    return {
        "host": node.get("NodeManagerHostname"),
        "address": node.get("NodeManagerAddress"),
        "cpus": resources.get("CPU", 0.0),
        "gpus": resources.get("GPU", 0.0),
        "gpu_type": gpu_types[0] if gpu_types else None,
        "memory_bytes": resources.get("memory"),
    }


def _dataset(source: DataSource) -> dict[str, Any]:
    manifest = source.manifest
    return {
        "sha256": manifest.identity,
        "samples": {split: manifest.samples(split) for split in ("train", "validation")},
        "places": [_location(origin) for origin in source.places],
        **manifest.model_dump(mode="json", exclude={"slices", "tensors", "classes", "origin"}),
    }


def _location(origin: Place) -> str:
    """Return the absolute path of a folder, a URL without its secrets, or the name of a dataset on data nodes."""
    if origin.served:
        return origin.address
    if is_url(origin.address):
        return redacted(origin.address)
    return str(Path(origin.address).absolute())


def _write(directory: RunDirectory, account: Mapping[str, Any]) -> None:
    directory.write(PROVENANCE, json.dumps(account, indent=1, ensure_ascii=False) + "\n")
