"""Local folders of a job, by names that hold in every working directory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.config.tables.rewards import RewardModel

T = TypeVar("T", Model, Preprocessor, RewardModel)


def with_absolute_folders(job: Job) -> Job:
    """Name folders of the model, the preprocessor, the reward model and the trackers absolutely; names of a hub stay.

    Actors need it, which run in another working directory than the driver. The job file that a run keeps has the names
    as they were given, so a project may be moved.
    """
    reward = job.rl.reward.model_copy(update={"model": _absolute(job.rl.reward.model)})
    rl = job.rl.model_copy(update={"reward": reward})
    tables = {name: _absolute(getattr(job, name)) for name in ("model", "preprocessor")}
    names = ("trackers", "aim_repository")
    folders = {name: _absolute_path(getattr(job.telemetry, name)) for name in names}
    return job.model_copy(update={**tables, "rl": rl, "telemetry": job.telemetry.model_copy(update=folders)})


def _absolute_path(folder: str | None) -> str | None:
    return folder if folder is None or "://" in folder else str(Path(folder).expanduser().absolute())


def _absolute(table: T) -> T:
    given = table.repository or ""
    folder = Path(given).expanduser()
    local = bool(given) and folder.is_dir()
    return table.model_copy(update={"repository": str(folder.absolute())}) if local else table
