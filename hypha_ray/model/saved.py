"""A model that is saved in a folder, opened for use."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.model.build import build_model, infer_task, task_of
from hypha_ray.model.hub import fetch
from hypha_ray.model.preprocess import load_specials
from hypha_ray.model.tasks import TASKS, Task, find_task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TASK = "task.json"
"""Beside a model that was trained here: an architecture may be for several tasks, and tensors chosen one by one."""


def note_task(folder: Path, model: Model) -> None:
    """Write down beside a model what it was trained for, and on which tensors if the job names them."""
    names = model.input_names
    content = {"type": find_task(model.type).name, **({} if names is None else {"input_names": list(names)})}
    (folder / _TASK).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def open_saved(folder: Path, task_name: str | None = None) -> tuple[PreTrainedModel, Task]:
    """Load a model, in evaluation mode, and its task from a folder that `save_pretrained` wrote.

    Args:
        folder: has configuration, weights, and perhaps a tokenizer.
        task_name: as in `model.type`; None: what it was trained for, or else the one of its architecture.

    Raises:
        HyphaError: as `build_model` and `infer_task`.

    """
    fetch(str(folder.absolute()), None, None)
    model = Model(repository=str(folder), **_task(folder, task_name))
    network = build_model(model, seed=0, whole=True).eval()
    masks = find_task(model.type).labels == "masked"
    return network, task_of(model, network, load_specials(Preprocessor(), None, model) if masks else None)


def _task(folder: Path, task_name: str | None) -> dict[str, Any]:
    """Return the keys of a job's `[model]` that say what the model is for."""
    noted = None
    with suppress(OSError, ValueError):
        noted = json.loads((folder / _TASK).read_text(encoding="utf-8"))
    if not isinstance(noted, dict) or noted.get("type") not in TASKS:
        return {"type": task_name or infer_task(folder).name}
    if task_name is not None and find_task(task_name).name != noted["type"]:
        return {"type": task_name}
    return {name: noted[name] for name in ("type", "input_names") if name in noted}
