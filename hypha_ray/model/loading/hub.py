"""Model repositories as local folders: a hub id is downloaded or found in the cache, a path is used as it is.

Only configuration, tokenizer and safetensors files are fetched. Every refusal of a hub becomes one of our errors here,
so that other modules read local files only. A repository may be an adapter that PEFT wrote, whose configuration names
its base model.

Folders of this machine are told from ids of the hub, and read without libraries.
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

REMOTE_CODE_VARIABLE: Final = "HYPHA_RAY_ALLOW_REMOTE_CODE"
"""Environment variable that allows code of repositories on a node."""

_SETTINGS: Final = ["*.json", "*.jinja", "*.txt", "*.model"]
_WEIGHTS: Final = ["*.safetensors"]
_CODE: Final = ["*.py"]
_LEFT_OUT: Final = ["*/*", "consolidated*"]
CONFIGURATION: Final = "adapter_config.json"
TASK: Final = "task.json"
"""File with the task of a saved model: its architecture may have several tasks, and the job may choose tensors."""
BASE: Final = "base"
"""Key of that file with the path of an adapter's base model from its folder, by the absolute one that it had."""


def local_folder(repository: str) -> Path | None:
    """Return the folder of a local repository; None for a hub id.

    Raises:
        ConfigError: HUB001, a path leads to no folder.

    """
    path = Path(repository).expanduser()
    if path.is_dir():
        return path
    if path.exists() or repository.startswith(("/", "./", "../", "~")):
        raise ConfigError(
            "HUB001",
            "model repository is not a folder" if path.exists() else "model folder doesn't exist",
            str(path),
            fix="give a folder that save_pretrained() wrote, or a hub id such as owner/name",
        )
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a folder.

    Raises:
        CheckpointError: the file is missing or damaged.

    """
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        allowed = "a folder with a saved model"
        raise CheckpointError("MODEL005", f"{file} can't be read", str(error), allowed, "give such a folder") from None
    if not isinstance(settings, dict):
        raise CheckpointError("MODEL005", f"{file} is no model configuration", type(settings).__name__, "an object")
    return settings


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
        patterns = list(_SETTINGS)
        if weights:
            patterns += _WEIGHTS
        if code:
            patterns += _CODE
        folder = _download(repository, revision, token, patterns)
    if weights and not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        raise CheckpointError(
            "SEC003",
            f"model repository {repository} has no safetensors weights",
            ", ".join(pickled),
            "*.safetensors; pickled weights could run code",
            "convert them with save_pretrained(), or choose another revision",
        )
    return folder


def hub_token(model: Model) -> str | None:
    """Return the hub token of a job's model; None: `HF_TOKEN` of the environment."""
    if not model.token:
        return None
    return model.token.get_secret_value()


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
    answer: BaseException | None = error
    if isinstance(error, errors.LocalEntryNotFoundError):
        answer = error.__cause__
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
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else first_line(error)
    return HubError(
        "HUB003",
        f"{repository} is neither a local folder nor whole in the cache, and can't be fetched: offline ({reason})",
        fix=f"check the network and HF_HUB_OFFLINE, or fill the cache {constants.HF_HUB_CACHE}",
    )


def base_of(model: Model) -> tuple[Model, Path | None]:
    """Return a model's table with the base model as its repository, and the folder of the adapter.

    An adapter that this package saved has the names of its labels, which are defaults for those of the job file.

    Returns:
        The table as it is and None, unless the repository is an adapter.

    Raises:
        HyphaError: the repository can't be fetched, or the adapter names no base model.

    """
    if not model.repository:
        return model, None
    token = hub_token(model)
    folder = fetch(model.repository, model.revision, token)
    if not (folder / CONFIGURATION).is_file() or (folder / "config.json").is_file():
        return model, None
    settings = _read(folder / CONFIGURATION)
    base = settings.get("base_model_name_or_path")
    revision = settings.get("revision")
    if not base or not isinstance(base, str):
        problem = f"adapter {model.repository} doesn't name its base model"
        fix = f"set base_model_name_or_path in its {CONFIGURATION} to the model that it was made for"
        raise CheckpointError("MODEL006", problem, repr(base), "a folder or hub id", fix)
    task: dict[str, Any] = {}
    if (folder / TASK).is_file():
        task = _read(folder / TASK)
    config = {**(task.get("labels") or {}), **(model.config or {})}
    relative_paths = task.get(BASE) or {}
    repository = _base_repository(base, relative_paths.get(base), folder)
    _require_base(repository, revision, token, folder / CONFIGURATION)
    base_keys = {"repository": repository, "revision": revision, "config": config or None}
    return model.model_copy(update=base_keys), folder


def _base_repository(base: str, relative_path: str | None, folder: Path) -> str:
    """Return the repository of a base model: a path, also one relative to the adapter's folder, or the name itself."""
    for path in (base, relative_path):
        if path is not None:
            beside = folder / Path(path).expanduser()
            if beside.is_dir():
                return str(beside.resolve())
    return base


def _require_base(base: str, revision: str | None, token: str | None, file: Path) -> None:
    """Refuse an adapter whose base model can't be fetched, and name the key of the adapter's file."""
    try:
        fetch(base, revision, token)
    except HyphaError as error:
        problem = f"{error.what}, which is the base model by base_model_name_or_path in {file}"
        fix = f"set base_model_name_or_path in {CONFIGURATION} to the base model's folder or hub id; {error.fix}"
        raise type(error)(error.code, problem, error.got, error.allowed, fix.removesuffix("; ")) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError("MODEL006", f"{file} can't be read", str(error), fix="copy the folder afresh") from None
    if not isinstance(settings, dict):
        got = type(settings).__name__
        raise CheckpointError("MODEL006", f"{file} is no description of an adapter", got, "an object")
    return settings
