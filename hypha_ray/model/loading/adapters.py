"""Adapters in repositories: a folder that PEFT wrote, and the base model that its configuration names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError, HyphaError
from hypha_ray.model.loading.hub import fetch

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
