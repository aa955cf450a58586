"""Checks that a dataset has the preferences that a loss takes; free of torch."""

from __future__ import annotations

from hypha_ray.config.tables.preference import Preference
from hypha_ray.data.manifest import Manifest
from hypha_ray.errors import DataError


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
