"""Credentials of a job: names of their environment variables, and the token of Ray's clusters on this machine.

The variables are those of hubs, object stores, trackers and judges. Their values are neither read here nor kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.keys import Key, values

HUB_TOKEN = "HF_TOKEN"
"""Variable of the token of the Hugging Face hub."""
_AZURE = (
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
)
_GOOGLE = ("GOOGLE_APPLICATION_CREDENTIALS",)
OF_STORES: Mapping[str, tuple[str, ...]] = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"),
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "az": _AZURE,
    "abfs": _AZURE,
    "abfss": _AZURE,
    "hf": (HUB_TOKEN,),
}
"""Variables of the clients of object stores, by the protocol of a URL."""
OF_SINKS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
    "trackio": ("TRACKIO_WRITE_TOKEN", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", HUB_TOKEN),
    "otel": ("OTEL_EXPORTER_OTLP_HEADERS",),
}
"""Variables of the clients of trackers, by the name of the sink."""
_NAMING = ("key_variable", "url_env")
"""Last parts of keys whose value is the name of a variable."""
_REPOSITORY = "repository"
"""Last part of keys that name a folder, or a repository of a hub."""


def variables_in_use(job: Job, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the variables that are set in an environment and may have credentials of a job, sorted."""
    names = set(_variables(job))
    prefixes = tuple(f"FSSPEC_{protocol.upper()}_" for protocol in protocols(job))
    for name in environment:
        if prefixes and name.startswith(prefixes):
            names.add(name)
    return sorted(name for name in names if environment.get(name))


def protocols(job: Job) -> set[str]:
    """Protocols of the URLs of a job's datasets and of its mirror, such as ``s3``."""
    urls = [part.path for part in job.dataset.parts]
    urls.append(job.checkpoint.mirror)
    return {url.partition("://")[0] for url in urls if url is not None and "://" in url}


def _variables(job: Job) -> Iterator[str]:
    """Names of variables that clients of the job's services read."""
    for protocol in protocols(job):
        yield from OF_STORES.get(protocol, ())
    for sink in job.telemetry.sinks:
        yield from OF_SINKS.get(sink, ())
    if job.checkpoint.push is not None:
        yield HUB_TOKEN
    for key, value in values(job):
        if isinstance(value, str):
            yield from _variables_of_key(key, value)


def _variables_of_key(key: Key, value: str) -> Iterator[str]:
    """Name of the variable that a key names, or that its repository of a hub needs."""
    last_part = key.path[-1]
    if last_part in _NAMING:
        yield value
    elif last_part == _REPOSITORY and not Path(value).expanduser().is_dir():
        yield HUB_TOKEN


def make_token() -> None:
    """Make a token if there is none: a head that isn't started by `ray.init` would end without one.

    To be called before several processes need the token at once, because each would make its own.

    Raises:
        CalledProcessError: Ray can't make one.

    """
    if not (Path.home() / ".ray" / "auth_token").exists():
        command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
        subprocess.run(command, capture_output=True, check=True)
