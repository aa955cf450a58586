"""Classes of a job's model: those of its dataset, unless the job file has others."""

from __future__ import annotations

from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.keys import LABELS
from hypha_ray.data.manifest import Manifest
from hypha_ray.model.tasks.table import find_task


def with_classes(job: Job, manifest: Manifest) -> Job:
    """The job, with the dataset's classes and their names in `[model.config]`, or a regression of its numbers.

    A job file that sets labels, and a task without classes, leave it as it is.
    """
    config, classes, task = dict(job.model.config or {}), manifest.classes, find_task(job.model.type)
    if LABELS & config.keys() or not task.classifies:
        return job
    if classes is None:
        numbers = any(one.name == "labels" and one.dtype == "float32" and not one.shape for one in manifest.tensors)
        regression = {"num_labels": 1, "problem_type": "regression"}
        return _with(job, config | regression) if numbers and task.labels == "samples" else job
    config["id2label"] = {str(number): name for number, name in enumerate(classes.names)}
    config["label2id"] = {name: number for number, name in enumerate(classes.names)}
    if classes.several:
        config["problem_type"] = "multi_label_classification"
    return _with(job, config)


def _with(job: Job, config: dict[str, Any]) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})
