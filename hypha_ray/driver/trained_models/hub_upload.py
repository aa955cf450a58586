"""Upload of a trained model to a hub, off unless a job asks for it by `checkpoint.push`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.tqdm import disable_progress_bars

from hypha_ray.errors import AuthenticationError, ConfigError, first_line
from hypha_ray.model.loading.hub import BASE, TASK

TOKEN = "HF_TOKEN"
"""Environment variable of the token: the only source of it."""
_DESCRIPTION = "adapter/adapter_config.json"
"""File of a model's folder that names the base of its adapter."""
_TASK = f"adapter/{TASK}"


def check_upload(repository: str) -> list[str]:
    """Refuse an upload that can't succeed, before a job starts.

    Returns:
        A note if the hub can't be reached now.

    Raises:
        AuthenticationError: HUB006 without a token, HUB002 with a token that the hub refuses.
        ConfigError: CFG011 if the hub isn't asked at all.

    """
    fix = f"export {TOKEN} with a token that may write, or leave checkpoint.push out"
    token = os.environ.get(TOKEN)
    if token is None:
        raise AuthenticationError("HUB006", f"checkpoint.push = {repository!r} needs a token", f"no {TOKEN}", fix=fix)
    if constants.HF_HUB_OFFLINE:
        fix = "unset HF_HUB_OFFLINE, or leave checkpoint.push out"
        raise ConfigError("CFG011", "checkpoint.push and HF_HUB_OFFLINE exclude each other", fix=fix)
    try:
        HfApi(token=token).whoami()
    except Exception as error:  # Clients raise anything from OSError to errors of their HTTP library.
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403):
            raise AuthenticationError("HUB002", f"the hub refuses {TOKEN}", f"HTTP {status}", fix=fix) from None
        return [f"the hub can't be reached now ({first_line(error)}); the upload to {repository} is tried at the end"]
    return []


def upload(folder: Path, repository: str, message: str) -> str:
    """Upload a model; a repository that doesn't exist is created, and is private.

    Returns:
        Result for the user; a failure costs nothing but the upload.

    """
    disable_progress_bars()
    retry = "the same command tries again"
    token = os.environ.get(TOKEN)
    if token is None:
        return f"the model isn't uploaded to {repository}, since {TOKEN} isn't set; {retry}"
    try:
        api = HfApi(token=token)
        api.create_repo(repository, private=True, exist_ok=True)
        changed_files = _without_paths(folder)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message=message, ignore_patterns=list(changed_files)
        )
        for name, content in changed_files.items():
            api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=repository, commit_message=message)
    except Exception as error:  # Clients raise anything from OSError to errors of their HTTP library.
        return f"the model isn't uploaded to {repository}: {first_line(error.__cause__ or error)}; {retry}"
    return f"the model is uploaded to {repository}"


def _without_paths(folder: Path) -> dict[str, bytes]:
    """Return files of an adapter that tell a path of its base model, with the last part of it alone."""
    file = folder / _DESCRIPTION
    if not file.is_file():
        return {}
    settings = json.loads(file.read_bytes())
    base = str(settings.get("base_model_name_or_path"))
    if not base.startswith(("/", ".", "~")):
        return {}
    settings["base_model_name_or_path"] = Path(base).name
    changed_files = {_DESCRIPTION: json.dumps(settings, indent=2).encode()}
    if (folder / _TASK).is_file():
        task = json.loads((folder / _TASK).read_bytes())
        task.pop(BASE, None)
        changed_files[_TASK] = json.dumps(task, indent=1).encode()
    return changed_files
