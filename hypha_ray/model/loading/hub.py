"""Model repositories as local folders: a hub id is downloaded or found in the cache, a path is used as it is.

Only configuration, tokenizer and safetensors files are fetched. Every refusal of a hub becomes one of our errors here,
so that other modules read local files only. A repository may be an adapter that PEFT wrote, whose configuration names
its base model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, errors, snapshot_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2, by its version

from hypha_ray.config.schema import Model
from hypha_ray.errors import AuthenticationError, CheckpointError, ConfigError, HubError, HyphaError, first_line
from hypha_ray.model.loading.folders import local_folder

REMOTE_CODE_VARIABLE: Final = "HYPHA_RAY_ALLOW_REMOTE_CODE"
"""Environment variable that allows code of repositories on a node."""

_SETTINGS: Final = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS: Final = ["*.safetensors"]
_CODE: Final = ["*.py"]
_LEFT_OUT: Final = ["*/*", "consolidated*"]


def fetch(
    repository: str, revision: str | None, token: str | None, *, weights: bool = False, code: bool = False
) -> Path:
    """Return a folder with a repository's files.

    Args:
        repository: folder, or hub id `name` or `owner/name`.
        revision: branch, tag or commit on the hub; None: the default branch.
        token: hub token; None: `HF_TOKEN` of the environment.
        weights: fetch weights, too.
        code: fetch Python files, too.

    Raises:
        ConfigError: the id is malformed, or folder, repository or revision doesn't exist.
        AuthenticationError: the repository requires a token, or another one.
        HubError: the hub can't be reached and the cache lacks the files.
        CheckpointError: the repository has no safetensors weights.

    """
    folder = local_folder(repository)
    if folder is None:
        patterns = _SETTINGS + (_WEIGHTS if weights else []) + (_CODE if code else [])
        folder = _download(repository, revision, token, patterns)
    if weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            "SEC003",
            f"model repository {repository} has no safetensors weights",
            ", ".join(sorted(file.name for file in folder.glob("*.bin"))),
            "*.safetensors; pickled weights could run code",
            "convert them with save_pretrained(), or choose another revision",
        )
    return folder


def remote_code_allowed(trust_remote_code: bool) -> bool:
    """Return whether code of a repository may run: the job asks for it, and this node allows it."""
    return trust_remote_code and os.environ.get(REMOTE_CODE_VARIABLE) == "1"


def _download(repository: str, revision: str | None, token: str | None, patterns: list[str]) -> Path:
    with _hub_errors(repository, revision):
        files = snapshot_download(
            repository, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_LEFT_OUT
        )
        return Path(str(files))


@contextmanager
def _hub_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of huggingface_hub into our errors."""
    try:
        yield
    except errors.HFValidationError:
        raise ConfigError(
            "CFG010", "model.repository is malformed", repr(repository), "a folder, or a hub id name or owner/name"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError("HUB001", f"model repository {repository} has no such revision", repr(revision)) from None
    except (OSError, HTTPError) as error:
        raise _refusal(repository, error) from None


def _refusal(repository: str, error: Exception) -> ConfigError | AuthenticationError | HubError:
    """Return our error for a hub that refuses, or that doesn't answer."""
    answer = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error
    status = answer.response.status_code if isinstance(answer, errors.HfHubHTTPError) else None
    if status in (401, 403):
        return AuthenticationError(
            "HUB002",
            f"the hub refuses access to {repository}",
            f"HTTP {status}",
            fix="check the name; if it is private or gated, ask for access and set HF_TOKEN",
        )
    if status == 404:
        return ConfigError(
            "HUB001", f"the hub has no model repository {repository}", fix="check the name, or give a local folder"
        )
    return _unreachable(repository, error)


def _unreachable(repository: str, error: Exception) -> HubError:
    """Return our error for a hub that doesn't answer, or that isn't asked because of `HF_HUB_OFFLINE`."""
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first_line(error)
    return HubError(
        "HUB003",
        f"{repository} is neither a local folder nor whole in the cache, and can't be fetched: offline ({why})",
        fix=f"check the network and HF_HUB_OFFLINE, or fill the cache {constants.HF_HUB_CACHE}",
    )


CONFIGURATION: Final = "adapter_config.json"
TASK: Final = "task.json"
"""File with the task of a saved model: its architecture may have several tasks, and the job may choose tensors."""


def base_of(model: Model) -> tuple[Model, Path | None]:
    """Return a model's table with the base model as its repository, and the folder of the adapter.

    An adapter that this package saved knows the names of its labels, which stand in for those of the job file.

    Returns:
        The table as it is and None, unless the repository is an adapter.

    Raises:
        HyphaError: the repository can't be had, or the adapter names no base model.

    """
    if not model.repository:
        return model, None
    token = model.token.get_secret_value() if model.token else None
    folder = fetch(model.repository, model.revision, token)
    if not (folder / CONFIGURATION).is_file() or (folder / "config.json").is_file():
        return model, None
    settings = _read(folder / CONFIGURATION)
    base = settings.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        what = f"adapter {model.repository} doesn't name its base model"
        fix = f"set base_model_name_or_path in its {CONFIGURATION} to the model that it was made for"
        raise CheckpointError("MODEL006", what, repr(base), "a folder or hub id", fix)
    labels = _read(folder / TASK).get("labels") if (folder / TASK).is_file() else None
    config = {**(labels or {}), **(model.config or {})} or None
    place = _place_of(base, folder)
    _require_base(place, settings.get("revision"), token, folder / CONFIGURATION)
    found = {"repository": place, "revision": settings.get("revision"), "config": config}
    return model.model_copy(update=found), folder


def _place_of(base: str, folder: Path) -> str:
    """Return the place of a base model: a relative path begins at the adapter's folder, else at the current one."""
    beside = folder / Path(base).expanduser()
    return str(beside.resolve()) if beside.is_dir() else base


def _require_base(base: str, revision: str | None, token: str | None, file: Path) -> None:
    """Refuse an adapter whose base model can't be had, and say where the adapter names it."""
    try:
        fetch(base, revision, token)
    except HyphaError as error:
        what = f"{error.what}, which is the base model by base_model_name_or_path in {file}"
        fix = f"set base_model_name_or_path in {CONFIGURATION} to the base model's folder or hub id; {error.fix}"
        raise type(error)(error.code, what, error.got, error.allowed, fix.removesuffix("; ")) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("MODEL006", f"{file} can't be read", str(error), fix="copy the folder afresh") from None
    if not isinstance(found, dict):
        raise CheckpointError("MODEL006", f"{file} is no description of an adapter", type(found).__name__, "an object")
    return found
