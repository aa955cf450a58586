"""Checks that a dataset has the preferences that a loss takes; free of torch.

Settings and reference by which a saved model is evaluated on preferences: those that it was trained with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypha_ray.config.schema import Job
from hypha_ray.config.training import Preference
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    import torch

    from hypha_ray.model.preferences.objective import Reference
    from hypha_ray.model.task import Task


_SETTINGS = ("none", "dataset")
"""Values of the option --reference that name no model."""


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
        fix = 'prepare it with --reference MODEL, or set preference.reference = "initial"'
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
    from hypha_ray.model.preferences.objective import with_preferences

    if task.name != "causal-lm":
        fix = "evaluate a language model, or name another dataset"
        raise ConfigError("CFG011", f"preferences and a model of {task.name} exclude each other", fix=fix)
    if job is not None and job.preference.loss is None:
        job = None
    settings = _settings(job, manifest, reference)
    require_preferences(manifest, settings)
    logprobs = None
    if settings.uses_reference and settings.reference == "initial":
        logprobs = _of_run(job, device) if reference is None else _of_folder(reference, device)
    name = "none"
    if settings.uses_reference:
        name = reference or settings.reference
    return with_preferences(task, settings, logprobs), f"{settings.loss}, reference {name}"


def _settings(job: Job | None, manifest: Manifest, reference: str | None) -> Preference:
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
    from hypha_ray.model.identity import changes, identity_of, pinned
    from hypha_ray.model.lora import build_trained, has_adapter
    from hypha_ray.model.preferences.objective import reference_model

    assert job is not None
    job = pinned(job, job.begun_with)  # A branch of the hub may be at another commit than when the run began.
    changed = [key for key in changes(identity_of(job), job.begun_with) if key.startswith("model.")]
    if changed:
        problem = f"the reference has changed since the run began with it ({', '.join(changed)})"
        fix = "put back what was there, or name the model by --reference, or none"
        raise CheckpointError("CKPT007", problem, str(job.model.repository), fix=fix)
    network = build_trained(job, device).to(device).eval()
    return reference_model(network, adapted=has_adapter(job.model))


def _of_folder(name: str, device: torch.device) -> Reference:
    """Reference that a folder or a repository of the hub has."""
    from hypha_ray.model.loading.hub import fetch
    from hypha_ray.model.preferences.objective import reference_model
    from hypha_ray.model.saved_model import open_saved

    network, _ = open_saved(fetch(name, None, None, weights=True))
    return reference_model(network.to(device))
