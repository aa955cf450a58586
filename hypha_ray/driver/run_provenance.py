"""Account of how a run was made, the file ``provenance.json`` of its directory; and what has changed since.

Its fields are those of the last start; `earlier` has those of the starts before, each with the devices of its workers.
Users of the machine can be named here: the file is private, as the whole run directory is.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypha_ray
from hypha_ray.config import Job
from hypha_ray.config.automatic import OFF
from hypha_ray.config.load import PROVENANCE, require_secrets, with_absolute_folders
from hypha_ray.data.catalogue import is_served, is_url, load, locate
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset, identities, mixed, whole
from hypha_ray.data.storage import Place, files_at
from hypha_ray.errors import ConfigError, HyphaError, reason_of
from hypha_ray.history.overview import readable
from hypha_ray.model.sources import IDENTITY, changes, identity_of
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import EVENTS, read_json, read_jsonl
from hypha_ray.texts import counted, redacted

if TYPE_CHECKING:
    from hypha_ray.driver.data_source import DataSource

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
_NOT_COMPARED = frozenset({"platform"})
"""Fields of the versions that don't change a result."""
_DIGITS = 12
"""Digits of a hash in a line."""


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

    Settings that were chosen automatically and failed with the first batch are disabled ones.

    A folder that can't be written is ignored: a run doesn't end because of its account.
    """
    account = read_json(directory.path / PROVENANCE)
    if not account:
        return
    start_time = str(account.get("wall_time", ""))
    events = read_jsonl(directory.path / EVENTS, ["join", "disable"])
    events = [event for event in events if event.get("wall_time", "") >= start_time]
    join_events = [event for event in events if event["kind"] == "join"]
    devices = {}
    settings = {}
    reasons = {}
    for event in sorted(join_events, key=lambda event: int(event["worker"])):
        worker_name = f"worker-{event['worker']}"
        devices[worker_name] = event.get("device")
        if "settings" in event:
            settings[worker_name] = event["settings"]
            reasons[worker_name] = event.get("reasons", {})
            for name in _disabled(events, event):
                settings[worker_name] |= {name: OFF[name]}
                reasons[worker_name] |= {name: "what was chosen doesn't work here"}
    account |= {"devices": devices, "settings": settings, "reasons": reasons}
    with suppress(ConfigError):
        _write(directory, account)


def _disabled(events: Sequence[Mapping[str, Any]], join_event: Mapping[str, Any]) -> list[str]:
    """Return the names of settings that a worker has disabled since it joined."""
    names: list[str] = []
    for event in events:
        is_its_own = all(event.get(field) == join_event.get(field) for field in ("worker", "incarnation"))
        if event["kind"] == "disable" and is_its_own:
            names += event["settings"]
    return names


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


def changes_since(folder: Path, provenance: Mapping[str, Any], job: Job) -> Iterator[str]:
    """Yield a line for each thing that has changed since a run.

    Args:
        folder: directory of the run.
        provenance: account of the run's last start; empty if there is none.
        job: the job that is to repeat it, in the working directory.

    Raises:
        DataError: DATA044, the account has a field that can't be understood.

    """
    with readable(folder / PROVENANCE):
        secrets = list(provenance.get("secrets", []))
        lines = [*code_changes(provenance), *version_changes(provenance.get("versions", {}), versions())]
    if provenance:
        yield from lines
    else:
        yield f"{folder.name} has no account of its start, so commit and versions can't be compared"
    yield from data_changes(RunDataset.parse(read_json(folder / DATASET)), job)
    yield from input_changes(folder / IDENTITY, job)
    yield from missing_secrets(secrets, job)


def code_changes(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield other commits and uncommitted changes, of this package and of the folder that the job runs in."""
    package = {name: provenance.get(name) for name in ("commit", "uncommitted_changes")}
    yield from _commit_changes("hypha_ray", package, commit_of(CHECKOUT))
    job_folder = provenance.get("working_folder")
    current_folder = Path.cwd()
    if job_folder and current_folder != CHECKOUT:
        yield from _commit_changes(str(current_folder), job_folder, commit_of(current_folder))


def _commit_changes(subject: str, old_commit: Mapping[str, Any], new_commit: Mapping[str, Any]) -> Iterator[str]:
    """Compare two accounts of a checkout."""
    if old_commit["commit"] != new_commit["commit"]:
        yield f"{subject} is at {_commit_text(new_commit)} here, and was at {_commit_text(old_commit)} in the run"
    if old_commit["uncommitted_changes"]:
        yield f"{subject} had uncommitted changes in the run"
    if new_commit["uncommitted_changes"]:
        yield f"{subject} has uncommitted changes here"


def _commit_text(account: Mapping[str, Any]) -> str:
    if account["commit"] is None:
        return "no commit"
    return f"commit {account['commit'][:_DIGITS]}"


def version_changes(old_versions: Mapping[str, str], new_versions: Mapping[str, str]) -> Iterator[str]:
    """Yield packages that the run had in another version."""
    for package, version in old_versions.items():
        if package in _NOT_COMPARED or new_versions.get(package) == version:
            continue
        if package in new_versions:
            yield f"{package} is {new_versions[package]} here, and was {version} in the run"
        else:
            yield f"{package} isn't installed here, and was {version} in the run"


def data_changes(dataset: RunDataset, job: Job) -> Iterator[str]:
    """Yield datasets that are missing, or have other samples than those of the run."""
    if dataset.sha256 is None:
        yield "the run doesn't tell the identity of its dataset, so the samples can't be compared"
        return
    try:
        manifest = _manifest_of(job)
    except HyphaError as error:
        yield f"{error.what}: {error.got}" if error.got else error.what
        return
    if manifest.identity == dataset.sha256:
        return
    sha256s = identities(manifest)
    parts = job.dataset.parts
    if len(sha256s) != max(1, len(dataset.datasets)):
        yield f"the run has {counted(len(dataset.datasets), 'dataset')}, and here are {len(sha256s)}"
        return
    for number, part in enumerate(parts):
        if sha256s[number] != dataset.of(number):
            yield f"dataset {part.path or part.name} has other samples here than in the run"


def _manifest_of(job: Job) -> Manifest:
    """Manifest of a job's dataset, from a folder, a URL or a data node.

    Raises:
        HyphaError: there is none, or it can't be reached.

    """
    if is_served(job.dataset):
        from hypha_ray.driver.data_source import opened

        with opened(job.dataset) as source:
            return source.manifest
    manifests: list[Manifest] = []
    for part in job.dataset.parts:
        if part.path is not None and is_url(part.path):
            files = files_at(part.path, part.cache_gb)
            manifests.append(whole([files.manifest()]))
        else:
            manifests.append(whole([load(locate(part))]))
    return mixed(manifests) if job.dataset.mix else manifests[0]


def input_changes(identity: Path, job: Job) -> Iterator[str]:
    """Yield weights, tokenizers and users' own code with other content than in the run, by their keys."""
    job_identity = identity_of(with_absolute_folders(job))
    if job_identity and not identity.is_file():
        yield f"the run doesn't tell the content of its inputs, so {', '.join(job_identity)} can't be compared"
    for key in changes(job_identity, read_json(identity)):
        yield f"{key} has other content here than in the run"


def missing_secrets(variables: list[str], job: Job) -> Iterator[str]:
    """Yield variables that aren't set here and were in the run, and URLs that lack their secret."""
    for variable in variables:
        if not os.environ.get(variable):
            yield f"{variable} isn't set here, and was in the run"
    try:
        require_secrets(job)
    except ConfigError as error:
        yield error.what
