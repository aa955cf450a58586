"""Folder of a trained model for `from_pretrained`: written with its task in a file, and opened for evaluation."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.errors import CheckpointError
from hypha_ray.model.compatible import forget_place, make_compatible
from hypha_ray.model.flat import Array
from hypha_ray.model.generation import settle_generation
from hypha_ray.model.layout import layout_of, load
from hypha_ray.model.loading.adapters import TASK, base_of
from hypha_ray.model.loading.build import build_model, infer_task, task_of
from hypha_ray.model.loading.folders import read_config
from hypha_ray.model.loading.hub import fetch
from hypha_ray.model.loading.preprocess import load_special_tokens
from hypha_ray.model.loading.weights import meta_tensors
from hypha_ray.model.lora import attach_adapter, has_adapter, merge_adapter, needs_whole, save_adapter
from hypha_ray.model.tasks.table import TASKS, find_task
from hypha_ray.model.tasks.task import Task
from hypha_ray.model.trained import build_trained, exported
from hypha_ray.modes import make_tree_private

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter"
"""Subfolder with the adapter alone."""
_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
_LABELS = ("id2label", "problem_type")
"""Keys of a configuration that tell names and kind of classes."""


def export(
    job: Job,
    preprocessor: Any | None,
    tensors: Mapping[str, Array],
    directory: Path,
    compatible: int | None = None,
) -> None:
    """Write weights, configuration, and tokenizer or image processor, for transformers to load.

    The folder appears whole or not at all, and replaces an older one. An adapter is merged into its base model, and
    saved by itself in the subfolder ``adapter`` for PEFT to load. One that was trained on quantized weights is merged
    into those of the repository.

    Args:
        job: job file; a repository is read again for frozen parameters, and new ones depend on the seed of the run.
        preprocessor: tokenizer or image processor from `load_preprocessor`, or None.
        tensors: trained tensors by name, from `layout.views`.
        directory: folder to write.
        compatible: older release of transformers that is to load it, too; None: this one and later ones.

    Raises:
        CheckpointError: the tensors don't fit the model, or the folder can't be written.
        HyphaError: the model can't be built.

    """
    job = job.model_copy(update={"model": job.model.model_copy(update={"quantization": None})})
    trained = build_trained(job)
    wanted = job.checkpoint.export_dtype or original_dtype(job.model)
    adapted = has_adapter(job.model)
    if wanted is not None and not adapted:
        trained = trained.to(getattr(torch, wanted))
    load(trained, layout_of(trained), tensors)
    network = exported(trained)
    settle_generation(network, preprocessor)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
            new = Path(scratch) / "new"
            if adapted:
                _save_adapter(network, job.model, preprocessor, new / ADAPTER, directory / ADAPTER)
                network = merge_adapter(network.float()).to(getattr(torch, wanted or "float32"))
            _save(network, job.model, preprocessor, new)
            if compatible is not None:
                make_compatible(new)
            make_tree_private(new)
            _replace(directory, new, Path(scratch) / "old")
    except (OSError, SafetensorError) as error:
        raise CheckpointError("MODEL013", f"model folder {directory} can't be written", str(error)) from error


def open_saved(folder: Path, task_name: str | None = None) -> tuple[PreTrainedModel, Task]:
    """Load a model, in evaluation mode, and its task from a folder that `save_pretrained` wrote.

    Args:
        folder: folder with configuration, weights, and optionally a tokenizer.
        task_name: task as in `model.type`; None: the task in the folder, otherwise that of the architecture.

    Raises:
        HyphaError: any error of `build_model` and `infer_task`.

    """
    fetch(str(folder.absolute()), None, None)
    model = Model(repository=str(folder), **_task(folder, task_name))
    adapted = has_adapter(model)
    network = build_model(model, seed=0, whole=not adapted or needs_whole(model))
    if adapted:
        merge_adapter(attach_adapter(network, model, seed=0))
    network = network.eval()
    masks = find_task(model.type).labels == "masked"
    return network, task_of(model, network, load_special_tokens(Preprocessor(), None, model) if masks else None)


def original_dtype(model: Model) -> str | None:
    """Return the dtype of a repository's weights by its configuration, otherwise by its files; None if unknown."""
    model, _ = base_of(model)
    if not model.repository:
        return None
    token = model.token.get_secret_value() if model.token else None
    folder = fetch(model.repository, model.revision, token, weights=True)
    settings = read_config(folder)
    named = str(settings.get("dtype") or settings.get("torch_dtype") or "").removeprefix("torch.")
    if named in _DTYPES:
        return named
    sizes: Counter[str] = Counter()
    for tensor in meta_tensors(folder, model.repository).values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    floats = [name for name, _ in sizes.most_common() if name in _DTYPES]
    return floats[0] if floats else None


def _replace(directory: Path, new: Path, old: Path) -> None:
    """Replace a folder by a new one."""
    if directory.exists():
        directory.rename(old)
    new.rename(directory)


def _save(network: PreTrainedModel, model: Model, preprocessor: Any | None, folder: Path) -> None:
    """Write a whole model with its task, and tokenizer or image processor."""
    disable_progress_bar()  # It would show one for a single file.
    network.save_pretrained(folder)
    _note_task(folder, model)
    if preprocessor is not None:
        preprocessor.save_pretrained(folder)
        forget_place(folder)


def _save_adapter(network: PreTrainedModel, model: Model, preprocessor: Any | None, folder: Path, final: Path) -> None:
    """Write an adapter with its task, and with names and kind of its classes, which the base model doesn't know."""
    folder.mkdir(parents=True)
    save_adapter(network, model, folder, final)
    labels = {name: value for name in _LABELS if (value := getattr(network.config, name)) is not None}
    _note_task(folder, model, {"labels": labels} if model.config else {})
    if network.can_generate():
        network.generation_config.save_pretrained(folder)
    if preprocessor is not None:
        preprocessor.save_pretrained(folder)
        forget_place(folder)


def _note_task(folder: Path, model: Model, further: Mapping[str, Any] | None = None) -> None:
    """Write a model's task into its folder, and the tensors it was fed if the job names them."""
    names = model.input_names
    content = {"type": find_task(model.type).name, **({} if names is None else {"input_names": list(names)})}
    content |= further or {}
    (folder / TASK).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _task(folder: Path, task_name: str | None) -> dict[str, Any]:
    """Return the keys of `[model]` that give a saved model's task."""
    noted = None
    with suppress(OSError, ValueError):
        noted = json.loads((folder / TASK).read_text(encoding="utf-8"))
    if not isinstance(noted, dict) or noted.get("type") not in TASKS:
        base, _ = base_of(Model(repository=str(folder)))
        return {"type": task_name or infer_task(fetch(str(base.repository), base.revision, None)).name}
    if task_name is not None and find_task(task_name).name != noted["type"]:
        return {"type": task_name}
    return {name: noted[name] for name in ("type", "input_names") if name in noted}
