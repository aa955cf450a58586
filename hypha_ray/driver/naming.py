"""Name and folder of a job's run."""

from __future__ import annotations

import time
from pathlib import Path

from hypha_ray.config import Job
from hypha_ray.config.load import require_complete
from hypha_ray.driver.folders import check_places
from hypha_ray.store.directory import RunDirectory, runs


def placed(job: Job, kind: str) -> tuple[Job, RunDirectory]:
    """Return a complete job with the name and folder of its run, which can be written.

    Args:
        job: the job file.
        kind: beginning of the name of a run that has none.

    Raises:
        ConfigError: the job lacks a key, or a folder can't be used.

    """
    require_complete(job)
    check_places(job)
    job = named(job, kind)
    return job, RunDirectory(Path(str(job.run.dir), str(job.run.name)))


def named(job: Job, kind: str) -> Job:
    """The job with the name and folder of its run filled in."""
    name = job.run.name or f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    return job.model_copy(update={"run": job.run.model_copy(update={"name": name, "dir": str(runs(job.run.dir))})})
