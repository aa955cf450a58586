"""Classes of a job's model, by default the dataset's, and of a saved model that is evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.keys import LABELS
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import DataError
from hypha_ray.model.flat import Array
from hypha_ray.model.task import Task
from hypha_ray.model.tasks import find_task

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUMBER: Final = "a number for each sample"
_CLASS: Final = "a class for each sample"
_SEVERAL: Final = "several classes at once for each sample"
_TOKENS: Final = "a class for each token"
_LISTED = 10
"""Most classes that a note lists."""


def with_classes(job: Job, manifest: Manifest) -> Job:
    """The job, with the dataset's classes and their names in `[model.config]`, or a regression of its numbers.

    The job stays as it is if its file sets labels, its task has no classes, or its model has a user's own factory.
    """
    config = dict(job.model.config or {})
    task = find_task(job.model.type)
    if LABELS & config.keys() or not task.classifies or job.model.factory is not None:
        return job
    classes = manifest.classes
    if classes is not None:
        id2label: dict[str, str] = {}
        label2id: dict[str, int] = {}
        for number, name in enumerate(classes.names):
            id2label[str(number)] = name
            label2id[name] = number
        config["id2label"] = id2label
        config["label2id"] = label2id
        if classes.several:
            config["problem_type"] = "multi_label_classification"
        elif job.model.repository and task.labels == "samples":  # The repository may have another problem type.
            config["problem_type"] = "single_label_classification"
    elif task.labels == "samples" and _labels_are_numbers(manifest):
        config["num_labels"] = 1
        config["problem_type"] = "regression"
    else:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"config": config})})


def _labels_are_numbers(manifest: Manifest) -> bool:
    """Whether the dataset has one number as the label of each sample."""
    for tensor in manifest.tensors:
        if tensor.name == "labels" and tensor.dtype == "float32" and not tensor.shape:
            return True
    return False


def require_fitting_labels(manifest: Manifest, task: Task, config: PretrainedConfig) -> None:
    """Refuse labels of another kind than a model predicts, whose loss would mean nothing or can't be computed.

    Raises:
        DataError: DATA023, the dataset's labels are of another kind, or of another number of classes at once.

    """
    kind = _kind_of_labels(manifest)
    predicted_kind = _predicted_kind(task, config)
    if kind is None or predicted_kind is None:
        return
    if kind != predicted_kind:
        problem = f"labels of dataset {manifest.name!r} are of another kind than the model predicts"
        fix = "evaluate it on labels of its kind, which prepare makes: numbers with --regression"
        raise DataError("DATA023", problem, kind, predicted_kind, fix)
    classes = manifest.classes
    shares_names = classes is not None and set(classes.names) & set(config.id2label.values())
    if kind == _SEVERAL and not shares_names and classes is not None and len(classes.names) != config.num_labels:
        problem = f"the model has another number of classes than dataset {manifest.name!r}, and shares no name"
        fix = "evaluate a model that was trained on these classes"
        raise DataError("DATA023", problem, str(len(classes.names)), str(config.num_labels), fix)


def _kind_of_labels(manifest: Manifest) -> str | None:
    """Kind of a dataset's labels; None if it isn't known."""
    classes = manifest.classes
    if classes is None:
        return _NUMBER if _labels_are_numbers(manifest) else None
    if classes.several:
        return _SEVERAL
    return _TOKENS if manifest.shapes.get("labels") else _CLASS


def _predicted_kind(task: Task, config: PretrainedConfig) -> str | None:
    """Kind of labels that a model predicts; None if it is none of those that prepare makes."""
    if task.name == "token-classification":
        return _TOKENS
    if task.labels != "samples":
        return None
    if task.measures:
        several = config.problem_type == "multi_label_classification"
        return _SEVERAL if several else _NUMBER
    return _CLASS if task.classifies else None


def with_sample_tokens(job: Job, manifest: Manifest) -> Job:
    """The job, with the number of tokens of a sample of the dataset."""
    shape = manifest.shapes.get("input_ids")
    return job.with_sample_tokens(None if shape is None else math.prod(shape))


def relabelled(
    slices: Iterable[Arrays], manifest: Manifest, task: Task, id2label: Mapping[int, str]
) -> Iterator[Arrays]:
    """Renumber the labels of slices: a class gets the number that a saved model has for its name.

    Another file of the same kind may lack a class, and then has other numbers. Labels stay as they are if dataset or
    model has no names of classes, or if no name is in both.

    Raises:
        DataError: DATA023, the model has only some of the dataset's classes.

    """
    classes = manifest.classes
    if classes is None or not (task.classifies or task.measures) or not set(classes.names) & set(id2label.values()):
        return iter(slices)
    label2id = {name: number for number, name in id2label.items()}
    missing = [name for name in classes.names if name not in label2id]
    if missing:
        problem = f"the model lacks classes of dataset {manifest.name!r}"
        allowed = ", ".join(list(label2id)[:20])
        raise DataError(
            "DATA023", problem, ", ".join(missing[:5]), allowed, "evaluate a model that was trained on them"
        )
    numbers = np.array([label2id[name] for name in classes.names])
    renumber = partial(_renumbered, numbers=numbers, several=classes.several, classes=len(label2id))
    return ({**arrays, "labels": renumber(arrays["labels"])} for arrays in slices)


def by_number(manifest: Manifest, task: Task, id2label: Mapping[int, str]) -> str | None:
    """Return a note if `relabelled` keeps numbers of classes because model and dataset share no name; None otherwise.

    A model with classes in another order would be scored wrongly, and without this note unnoticed.
    """
    classes = manifest.classes
    if classes is None or not (task.classifies or task.measures) or set(classes.names) & set(id2label.values()):
        return None
    pairs = []
    for number, name in enumerate(classes.names):
        if number in id2label:
            pairs.append(f"{name} = {id2label[number]}")
    listed = ", ".join(pairs[:_LISTED])
    ellipsis = ", …" if len(pairs) > _LISTED else ""
    return f"model and dataset share no class name, so classes go by number: {listed}{ellipsis}"


def _renumbered(labels: Array, numbers: Array, several: bool, classes: int) -> Array:
    """Labels with other numbers; labels with several classes a sample have a column for each class."""
    if several:
        columns = np.zeros((len(labels), classes), labels.dtype)
        columns[:, numbers] = labels
        return columns
    scored = labels >= 0
    return np.where(scored, numbers[np.where(scored, labels, 0)], labels).astype(labels.dtype)
