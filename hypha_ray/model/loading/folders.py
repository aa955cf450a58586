"""Model repositories that are folders of this machine, told from ids of the hub and read without libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypha_ray.errors import CheckpointError, ConfigError


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
