"""Classes of a job's model: those of its dataset, unless the job file has others."""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.config.keys import LABELS
from hypha_ray.data.manifest import Manifest
from hypha_ray.model.tasks.table import find_task


def with_classes(job: Job, manifest: Manifest) -> Job:
    """The job, with the dataset's classes and their names in `[model.config]`.

    A job file that sets labels, and a task without classes, leave it as it is.
    """
    config, classes = dict(job.model.config or {}), manifest.classes
    if classes is None or LABELS & config.keys() or not find_task(job.model.type).classifies:
        return job
    config["id2label"] = {str(number): name for number, name in enumerate(classes.names)}
    config["label2id"] = {name: number for number, name in enumerate(classes.names)}
    if classes.several:
        config["problem_type"] = "multi_label_classification"
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})
