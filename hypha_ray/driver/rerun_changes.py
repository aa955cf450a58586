"""Changes since a run that may give its repetition another result, in a line each, or that prevent it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.load import require_secrets, with_absolute_folders
from hypha_ray.data.catalogue import is_served, load, locate
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset, identities, mixed, whole
from hypha_ray.data.storage import files_at
from hypha_ray.data.url_folder import is_url
from hypha_ray.driver.run_provenance import CHECKOUT, commit_of, versions
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.history.overview import PROVENANCE, readable
from hypha_ray.model.identity import IDENTITY, changes, identity_of
from hypha_ray.telemetry.sinks.files import read_json
from hypha_ray.texts import counted

_NOT_COMPARED = frozenset({"platform"})
"""Fields of the versions that don't change a result."""
_DIGITS = 12
"""Digits of a hash in a line."""


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
    here = Path.cwd()
    if job_folder and here != CHECKOUT:
        yield from _commit_changes(str(here), job_folder, commit_of(here))


def _commit_changes(subject: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Compare two accounts of a checkout."""
    if then["commit"] != now["commit"]:
        yield f"{subject} is at {_commit_text(now)} here, and was at {_commit_text(then)} in the run"
    if then["uncommitted_changes"]:
        yield f"{subject} had uncommitted changes in the run"
    if now["uncommitted_changes"]:
        yield f"{subject} has uncommitted changes here"


def _commit_text(account: Mapping[str, Any]) -> str:
    if account["commit"] is None:
        return "no commit"
    return f"commit {account['commit'][:_DIGITS]}"


def version_changes(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield packages that the run had in another version."""
    for package, version in then.items():
        if package in _NOT_COMPARED or now.get(package) == version:
            continue
        if package in now:
            yield f"{package} is {now[package]} here, and was {version} in the run"
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
    """Manifest of a job's dataset, wherever it lies.

    Raises:
        HyphaError: there is none, or it can't be reached.

    """
    if is_served(job.dataset):
        from hypha_ray.driver.datasets.data_source import opened

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
    present = identity_of(with_absolute_folders(job))
    if present and not identity.is_file():
        yield f"the run doesn't tell the content of its inputs, so {', '.join(present)} can't be compared"
    for key in changes(present, read_json(identity)):
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
