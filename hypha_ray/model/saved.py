"""A model that is saved in a folder, opened for use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.model.build import build_model, infer_task, task_of
from hypha_ray.model.hub import fetch
from hypha_ray.model.preprocess import load_specials
from hypha_ray.model.tasks import Task, find_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def open_saved(folder: Path, task_name: str | None = None) -> tuple[PreTrainedModel, Task]:
    """Load a model, in evaluation mode, and its task from a folder that `save_pretrained` wrote.

    Args:
        folder: has configuration, weights, and perhaps a tokenizer.
        task_name: as in `model.type`; None: the one of the model's architecture.

    Raises:
        HyphaError: as `build_model` and `infer_task`.

    """
    fetch(str(folder.absolute()), None, None)
    model = Model(repository=str(folder), type=task_name or infer_task(folder).name)
    network = build_model(model, seed=0, whole=True).eval()
    masks = find_task(model.type).labels == "masked"
    return network, task_of(model, network, load_specials(Preprocessor(), None, model) if masks else None)
