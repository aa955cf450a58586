"""Job scripts and their job files, which lie beside the package in a checkout and inside it once it is installed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_PACKAGE: Final = next(folder for folder in Path(__file__).parents if folder.name == "hypha_ray")
_INSTALLED: Final = _PACKAGE / "jobs"


def jobs_folder() -> Path:
    """Return the folder of the job scripts."""
    return _INSTALLED if _INSTALLED.is_dir() else _PACKAGE.parent / "jobs"


def find_file(file: str) -> Path:
    """Return the path of a job file; a bare name may be one of those that come with the package."""
    packaged = {path.name: path for path in (jobs_folder() / "configs").glob("*.toml")}
    return packaged[file] if file in packaged and not Path(file).exists() else Path(file)


def as_installed(text: str) -> str:
    """Return a job script's description with the commands by which it is started here."""
    if not _INSTALLED.is_dir():
        return text
    return re.sub(r"jobs/configs/(\w+\.toml)", r"\1", re.sub(r"python jobs/(\w+)\.py", r"hypha-ray \1", text))
