"""Local folders of a job, by names that hold in every working directory of this machine."""

from __future__ import annotations

from pathlib import Path

from hypha_ray.config.schema import Job


def with_absolute_folders(job: Job) -> Job:
    """Name folders of the model and the preprocessor absolutely; names of a hub stay.

    Actors need it, which run in another working directory than the driver. The job file that a run keeps has the names
    as they were given, so a project may be moved.
    """
    tables = {}
    for name in ("model", "preprocessor"):
        table = getattr(job, name)
        folder = Path(table.repository or "").expanduser()
        if table.repository and folder.is_dir():
            tables[name] = table.model_copy(update={"repository": str(folder.absolute())})
    return job.model_copy(update=tables)
