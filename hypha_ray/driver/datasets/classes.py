"""Classes of a job's model, which are those of its dataset unless the job file has others, and of a saved model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.keys import LABELS
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError
from hypha_ray.model.flat import Array
from hypha_ray.model.tasks.table import find_task
from hypha_ray.model.tasks.task import Task

_LISTED = 10
"""Most classes that a note lists."""


def with_classes(job: Job, manifest: Manifest) -> Job:
    """The job, with the dataset's classes and their names in `[model.config]`, or a regression of its numbers.

    A job file that sets labels, a task without classes, and a model of a user's own factory leave it as it is.
    """
    config = dict(job.model.config or {})
    classes = manifest.classes
    task = find_task(job.model.type)
    if LABELS & config.keys() or not task.classifies or job.model.factory is not None:
        return job
    if classes is None:
        numbers = any(one.name == "labels" and one.dtype == "float32" and not one.shape for one in manifest.tensors)
        regression = {"num_labels": 1, "problem_type": "regression"}
        return _with(job, config | regression) if numbers and task.labels == "samples" else job
    config["id2label"] = {str(number): name for number, name in enumerate(classes.names)}
    config["label2id"] = {name: number for number, name in enumerate(classes.names)}
    if classes.several:
        config["problem_type"] = "multi_label_classification"
    elif job.model.repository and task.labels == "samples":  # The repository may have another.
        config["problem_type"] = "single_label_classification"
    return _with(job, config)


def with_sample_tokens(job: Job, manifest: Manifest) -> Job:
    """The job, with the number of tokens of a sample of the dataset."""
    shape = manifest.shapes.get("input_ids")
    return job.with_sample_tokens(None if shape is None else math.prod(shape))


def relabelled(
    slices: Iterable[Arrays], manifest: Manifest, task: Task, id2label: Mapping[int, str]
) -> Iterator[Arrays]:
    """Return slices of a dataset with the numbers that a saved model has for their classes, by name.

    Another file of the same kind may lack a class, so that its own numbers are others. They stay as they are if
    dataset or model has no names of classes, or if no name is in both.

    Raises:
        DataError: DATA023, the model has only some of the dataset's classes.

    """
    classes = manifest.classes
    if classes is None or not (task.classifies or task.measures) or not set(classes.names) & set(id2label.values()):
        return iter(slices)
    known = {name: number for number, name in id2label.items()}
    if missing := [name for name in classes.names if name not in known]:
        what = f"the model lacks classes of dataset {manifest.name!r}"
        fix = "evaluate a model that was trained on them"
        raise DataError("DATA023", what, ", ".join(missing[:5]), ", ".join([*known][:20]), fix)
    numbers = np.array([known[name] for name in classes.names])
    return (
        {**arrays, "labels": _renumbered(arrays["labels"], numbers, classes.several, len(known))} for arrays in slices
    )


def by_number(manifest: Manifest, task: Task, id2label: Mapping[int, str]) -> str | None:
    """Return a note about the classes that `relabelled` takes by number, because no name is in both; None: it doesn't.

    A model whose classes are in another order would be scored wrongly, which nothing else would show.
    """
    classes = manifest.classes
    if classes is None or not (task.classifies or task.measures) or set(classes.names) & set(id2label.values()):
        return None
    pairs = [f"{name} = {id2label[number]}" for number, name in enumerate(classes.names) if number in id2label]
    more = ", …" if len(pairs) > _LISTED else ""
    return f"model and dataset share no class name, so classes go by number: {', '.join(pairs[:_LISTED])}{more}"


def _renumbered(labels: Array, numbers: Array, several: bool, classes: int) -> Array:
    """Labels with other numbers; those of several classes have a column for each class."""
    if several:
        found = np.zeros((len(labels), classes), labels.dtype)
        found[:, numbers] = labels
        return found
    return np.where(labels < 0, labels, numbers[labels]).astype(labels.dtype)


def _with(job: Job, config: dict[str, Any]) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})
