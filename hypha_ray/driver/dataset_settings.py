"""Settings of a job by its dataset: classes of its model, number of rounds, and whether preferences can be learnt."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.keys import LABELS
from hypha_ray.config.schema import beside_largest, largest, rounds_for
from hypha_ray.config.training import Preference
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import Arrays
from hypha_ray.errors import CheckpointError, ConfigError, DataError
from hypha_ray.model.flat import Array
from hypha_ray.model.task import Task
from hypha_ray.model.tasks import find_task
from hypha_ray.optim.schedules import check_schedule, inner_steps
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import RunDirectory, quarantined
from hypha_ray.store.restore_point import usable_rounds
from hypha_ray.texts import counted
from hypha_ray.types import SliceInfo, Span, dataset_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from hypha_ray.model.preferences.losses import Reference
    from hypha_ray.model.task import Task

_NUMBER: Final = "a number for each sample"
_CLASS: Final = "a class for each sample"
_SEVERAL: Final = "several classes at once for each sample"
_TOKENS: Final = "a class for each token"
_LISTED = 10
"""Most classes that a note lists."""
_SETTINGS = ("none", "dataset")
"""Values of the option --reference that name no model."""


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
        has_several = config.problem_type == "multi_label_classification"
        return _SEVERAL if has_several else _NUMBER
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
    renumber = partial(_renumbered, numbers=numbers, has_several=classes.several, classes=len(label2id))
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
    listed_pairs = ", ".join(pairs[:_LISTED])
    ellipsis = ", …" if len(pairs) > _LISTED else ""
    return f"model and dataset share no class name, so classes go by number: {listed_pairs}{ellipsis}"


def _renumbered(labels: Array, numbers: Array, has_several: bool, classes: int) -> Array:
    """Labels with other numbers; labels with several classes a sample have a column for each class."""
    if has_several:
        columns = np.zeros((len(labels), classes), labels.dtype)
        columns[:, numbers] = labels
        return columns
    is_scored = labels >= 0
    return np.where(is_scored, numbers[np.where(is_scored, labels, 0)], labels).astype(labels.dtype)


@dataclass(frozen=True, slots=True)
class EpochSamples:
    """Length of a run, in samples of all its epochs."""

    own: int
    """Samples of the dataset, or of the largest one of a mixture."""
    others: int
    """Samples of the other datasets of a mixture."""


def with_rounds(job: Job, manifest: Manifest, directory: RunDirectory | None) -> Job:
    """The job with the number of rounds that its epochs take, rounds of its run included; without epochs unchanged.

    Args:
        job: the job.
        manifest: of the dataset.
        directory: run directory, which may not exist yet; None: the run has no name yet.

    Raises:
        ConfigError: CFG003, the warm-up has more rounds, or the run has begun more epochs; or as `check_schedule`.
        CheckpointError: STORE002, a commit record is damaged.

    """
    if job.rounds.epochs is None:
        return job
    slices: Sequence[SliceInfo] = manifest.of("train")
    next_round = 0
    spans: list[Span] = []
    if directory is not None and directory.begun:
        damaged = quarantined(directory.path)
        slices = [info for info in slices if info.index not in damaged]
        next_round = usable_rounds(directory.path)
        spans = _used_spans(directory, next_round)
        _check_epochs(job, spans)
    rounds = next_round + rounds_for(job, _unused(job, slices, spans), next_round)
    job = job.lasting(max(1, rounds))
    _check_warmup(job)
    check_schedule(job.inner_optimizer, inner_steps(job))
    return job


def length_note(job: Job, manifest: Manifest) -> str | None:
    """A line about the length of a run; None if the job file gives its rounds."""
    epochs = job.rounds.epochs
    if epochs is None:
        return None
    samples = _samples_by_dataset(manifest.of("train"))
    text = f"rounds.epochs = {epochs}: {counted(samples_in_epochs(job, manifest), 'sample')}"
    text += f" in {counted(job.rounds.update_rounds, 'round')}"
    if not job.dataset.mix:
        return text
    dataset = largest(samples)
    share = job.dataset.mix[dataset]
    return f"{text}; those of {share.name or share.path}, the largest dataset, {counted(epochs, 'time')}"


def samples_in_epochs(job: Job, manifest: Manifest) -> int:
    """Number of samples that a run uses whose job file gives epochs."""
    length = _length(job, _samples_by_dataset(manifest.of("train")))
    return length.own + length.others


def _unused(job: Job, slices: Sequence[SliceInfo], spans: Iterable[Span]) -> int:
    """Samples of all epochs that no span has."""
    assert job.rounds.epochs is not None
    samples = _samples_by_dataset(slices)
    length = _length(job, samples)
    dataset = largest(samples)
    indices = {info.index for info in slices}
    used_samples: Counter[bool] = Counter()
    for span in spans:
        is_own = dataset_of(span.slice) == dataset
        if not is_own or (span.slice in indices and span.epoch < job.rounds.epochs):
            used_samples[is_own] += span.samples
    return max(0, length.own - used_samples[True]) + max(0, length.others - used_samples[False])


def _length(job: Job, samples: Sequence[int]) -> EpochSamples:
    assert job.rounds.epochs is not None
    weights = [share.weight for share in job.dataset.mix] or [1.0]
    other_samples = beside_largest(samples, weights, job.rounds.epochs)
    return EpochSamples(job.rounds.epochs * max(samples), other_samples)


def _samples_by_dataset(slices: Iterable[SliceInfo]) -> list[int]:
    """Samples of each dataset of a mixture, in its order, or of the only one."""
    samples: Counter[int] = Counter()
    for info in slices:
        samples[dataset_of(info.index)] += info.samples
    return [samples[dataset] for dataset in range(max(samples, default=0) + 1)]


def _used_spans(directory: RunDirectory, rounds: int) -> list[Span]:
    """Samples of the first rounds of a run."""
    log = CommitLog(directory.path)
    spans: list[Span] = []
    for round in range(rounds):
        for _, worker_spans in log.load(round).spans:
            spans += worker_spans
    return spans


def _check_epochs(job: Job, spans: Iterable[Span]) -> None:
    """Refuse fewer epochs than a run has begun; datasets of a mixture have epochs of their own."""
    assert job.rounds.epochs is not None
    epochs = max((span.epoch + 1 for span in spans), default=0)
    if epochs > job.rounds.epochs and not job.dataset.mix:
        problem = "rounds.epochs is less than the run has begun"
        fix = "leave it out, or choose another run.name for a shorter run"
        raise ConfigError("CFG003", problem, str(job.rounds.epochs), f"{epochs} or more", fix)


def _check_warmup(job: Job) -> None:
    warmup = job.rounds.warmup_rounds
    if warmup > job.rounds.update_rounds:
        problem = f"rounds.warmup_rounds is more than the rounds of rounds.epochs = {job.rounds.epochs}"
        fix = "mend rounds.warmup_rounds or rounds.epochs, or have shorter rounds"
        raise ConfigError("CFG003", problem, str(warmup), f"up to {job.rounds.update_rounds}", fix)


def require_preferences(manifest: Manifest, settings: Preference) -> None:
    """Refuse a dataset that lacks what a loss of preferences takes.

    Args:
        manifest: manifest of the dataset.
        settings: table of the job file, with a loss.

    Raises:
        DataError: PREF001, it has no log-probabilities of a reference; PREF002, no preferences; PREF003, those of
            another kind.

    """
    problem = f"dataset {manifest.name!r} has no preferences"
    if manifest.modality != "preferences":
        fix = "prepare it by --kind preferences from columns prompt, chosen and rejected"
        raise DataError("PREF002", problem, manifest.modality, "preferences", fix)
    tensors = manifest.shapes.keys()
    is_judged = "desirable" in tensors
    if is_judged not in settings.kinds:
        got = "answers that are judged one by one" if is_judged else "chosen and rejected answers"
        allowed = "chosen and rejected answers" if is_judged else "answers that are judged one by one"
        fix = 'set preference.loss = "kto"' if is_judged else "choose another preference.loss"
        problem = f"preference.loss = {settings.loss!r} can't be computed on dataset {manifest.name!r}"
        raise DataError("PREF003", problem, got, allowed, f"{fix}, or prepare the dataset from other columns")
    if settings.uses_reference and settings.reference == "dataset" and "reference_logprobs" not in tensors:
        problem = f"dataset {manifest.name!r} has no log-probabilities of a reference"
        fix = (
            'prepare it with --reference MODEL, or set preference.reference = "initial"; '
            "of evaluate, --reference names a model or none"
        )
        raise DataError("PREF001", problem, fix=fix)


def preference_task(
    task: Task, job: Job | None, manifest: Manifest, reference: str | None, device: torch.device
) -> tuple[Task, str]:
    """Return the task by which a saved model is evaluated on preferences, and a description of loss and reference.

    Loss and settings are those of the run that saved the model. Without one that was trained on preferences, they are
    the defaults of dpo, or of kto for answers that are judged one by one.

    Args:
        task: task of the saved model.
        job: job of the run that saved the model; None: there is no run.
        manifest: manifest of the dataset.
        reference: folder or hub id of a model, ``dataset`` or ``none``; None: that of the run.
        device: device that the reference is used on.

    Raises:
        ConfigError: CFG011, the model is no causal language model; CFG012, no reference is known.
        DataError: the loss can't be computed on the dataset.
        HyphaError: the reference can't be loaded, or has changed since the run began.

    """
    from hypha_ray.model.preferences.losses import with_preferences

    if task.name != "causal-lm":
        fix = "evaluate a language model, or name another dataset"
        raise ConfigError("CFG011", f"preferences and a model of {task.name} exclude each other", fix=fix)
    if job is not None and job.preference.loss is None:
        job = None
    settings = _settings_of_evaluation(job, manifest, reference)
    require_preferences(manifest, settings)
    logprobs = None
    if settings.uses_reference and settings.reference == "initial":
        logprobs = _of_run(job, device) if reference is None else _of_folder(reference, device)
    name = "none"
    if settings.uses_reference:
        name = reference or settings.reference
    return with_preferences(task, settings, logprobs), f"{settings.loss}, reference {name}"


def _settings_of_evaluation(job: Job | None, manifest: Manifest, reference: str | None) -> Preference:
    """Settings of a run, otherwise the defaults; with the reference that an option names."""
    loss = "kto" if "desirable" in manifest.shapes else "dpo"
    settings = Preference(loss=loss) if job is None else job.preference
    if reference in _SETTINGS:
        return settings.model_copy(update={"reference": reference})
    if reference is not None:
        return settings.model_copy(update={"reference": "initial"})
    if job is not None:
        return settings
    if "reference_logprobs" in manifest.shapes:
        return settings.model_copy(update={"reference": "dataset"})
    fix = "give the model that the training began with; or none, for rewards without one"
    raise ConfigError("CFG012", "--reference is missing, and the model lies in no run of the job dpo", fix=fix)


def _of_run(job: Job | None, device: torch.device) -> Reference:
    """Reference of a run: its model before training.

    Raises:
        CheckpointError: CKPT007, that model's files have changed since.

    """
    from hypha_ray.model.lora import build_trained, has_adapter
    from hypha_ray.model.preferences.losses import reference_model
    from hypha_ray.model.sources import changes, identity_of, pinned

    assert job is not None
    job = pinned(job, job.begun_with)  # A branch of the hub may be at another commit than when the run began.
    changed_keys = [key for key in changes(identity_of(job), job.begun_with) if key.startswith("model.")]
    if changed_keys:
        problem = f"the reference has changed since the run began with it ({', '.join(changed_keys)})"
        fix = "put back what was there, or name the model by --reference, or none"
        raise CheckpointError("CKPT007", problem, str(job.model.repository), fix=fix)
    network = build_trained(job, device).to(device).eval()
    return reference_model(network, adapted=has_adapter(job.model))


def _of_folder(name: str, device: torch.device) -> Reference:
    """Reference that a folder or a repository of the hub has."""
    from hypha_ray.model.preferences.losses import reference_model
    from hypha_ray.model.saved_model import open_saved
    from hypha_ray.model.sources import fetch

    network, _ = open_saved(fetch(name, None, None, needs_weights=True))
    return reference_model(network.to(device))
