"""Folder of a trained model for `from_pretrained`: written with its task in a file, and opened for evaluation.

Release 5 of transformers renamed settings, which release 4 ignores silently. For it a folder is rewritten:

rope_parameters                 ──► rope_theta, rope_scaling, partial_rotary_factor, rope_local_base_freq
tokenizer_class of release 5    ──► PreTrainedTokenizerFast
extra_special_tokens, a list    ──► additional_special_tokens
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.errors import CheckpointError
from hypha_ray.files import has_ended, make_tree_private
from hypha_ray.model.build import build_model, infer_task, reopened, task_of
from hypha_ray.model.flat import Array
from hypha_ray.model.layout import layout_of, load
from hypha_ray.model.lora import (
    attach_adapter,
    build_trained,
    exported,
    has_adapter,
    merge_adapter,
    needs_whole,
    save_adapter,
)
from hypha_ray.model.sources import BASE, TASK, base_of, fetch, hub_token, read_config
from hypha_ray.model.task import Task
from hypha_ray.model.tasks import TASKS, find_task
from hypha_ray.model.tokenizers import load_special_tokens, save_flat, settle_generation
from hypha_ray.model.weights import meta_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ADAPTER = "adapter"
"""Subfolder with the adapter alone."""
_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})
_LABELS = ("id2label", "problem_type")
"""Keys of a configuration that tell names and kind of classes."""
OLDEST: Final = 4
"""Oldest release of transformers that a folder can be written for."""
_SOURCE_KEYS: Final = ("is_local", "local_files_only", "name_or_path")
"""Keys of a tokenizer's settings that hold the source of the tokenizer."""
_ROTARY: Final = ("rope_theta", "partial_rotary_factor")
"""Settings of rotary positions that are top-level keys in release 4."""


def export(
    job: Job,
    preprocessor: Any | None,
    tensors: Mapping[str, Array],
    directory: Path,
    compatible: int | None = None,
    round: int | None = None,
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
        round: round of the weights in their run, counted from 0, to be written beside the task; None: not known.

    Raises:
        CheckpointError: the tensors don't fit the model, or the folder can't be written.
        HyphaError: the model can't be built.

    """
    unquantized = job.model.model_copy(update={"quantization": None})
    job = job.model_copy(update={"model": unquantized})
    dtype_name = job.checkpoint.export_dtype or original_dtype(job.model)
    adapted = has_adapter(job.model)
    network = _with_weights(job, tensors, None if adapted else dtype_name)
    settle_generation(network, preprocessor)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _scratch_beside(directory) as scratch:
            new_folder = scratch / "new"
            if adapted:
                _save_adapter(network, job.model, preprocessor, new_folder / ADAPTER, directory / ADAPTER)
                network = merge_adapter(network.float())
                network = network.to(getattr(torch, dtype_name or "float32"))
            _save(network, job.model, preprocessor, new_folder)
            if compatible is not None:
                make_compatible(new_folder)
            if round is not None:
                _write(new_folder / TASK, _read(new_folder / TASK) | {"round": round})
            make_tree_private(new_folder)
            _replace(directory, new_folder, scratch / "old")
    except (OSError, SafetensorError) as error:
        raise CheckpointError("MODEL013", f"model folder {directory} can't be written", str(error)) from error


@contextmanager
def _scratch_beside(directory: Path) -> Iterator[Path]:
    """Make a hidden folder beside another one, in which that is written; it is removed at the end.

    Those of processes of this machine that were killed before their end are removed, too.
    """
    prefix = f".{directory.name[:100]}-{socket.gethostname()[:64]}-"
    with suppress(OSError):
        for folder in directory.parent.iterdir():
            process, _, _ = folder.name.removeprefix(prefix).partition("-")
            if folder.name.startswith(prefix) and has_ended(process):
                shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=directory.parent) as scratch:
        yield Path(scratch)


def _with_weights(job: Job, tensors: Mapping[str, Array], dtype_name: str | None) -> PreTrainedModel:
    """Build a job's model with trained weights, in a dtype or, without its name, in that of its training."""
    trained_model = build_trained(job)
    if dtype_name is not None:
        trained_model = trained_model.to(getattr(torch, dtype_name))
    load(trained_model, layout_of(trained_model), tensors)
    return exported(trained_model)


def open_saved(
    folder: Path, task_name: str | None = None, trained: Model | None = None
) -> tuple[PreTrainedModel, Task]:
    """Load a model, in evaluation mode, and its task from a folder that `save_pretrained` wrote.

    Args:
        folder: folder with configuration, weights, and optionally a tokenizer.
        task_name: task as in `model.type`; None: the task in the folder, otherwise that of the architecture.
        trained: table of the run that saved the folder, whose factory and loss are used again; None: there is no run.

    Raises:
        HyphaError: any error of `build_model` and `infer_task`.

    """
    fetch(str(folder.absolute()), None, None)
    settings = _read_task(folder, task_name)
    if trained is not None:
        settings |= _brought_along(trained, settings["type"])
    model = Model(repository=str(folder), **settings)
    if model.factory is not None:
        network = reopened(model)
    else:
        adapted = has_adapter(model)
        network = build_model(model, seed=0, needs_all=not adapted or needs_whole(model))
        if adapted:
            merge_adapter(attach_adapter(network, model, seed=0))
    network = network.eval()
    tokenizer = None
    if find_task(model.type).labels == "masked":
        tokenizer = load_special_tokens(Preprocessor(), None, model)
    return network, task_of(model, network, tokenizer)


def original_dtype(model: Model) -> str | None:
    """Return the dtype of a repository's weights by its configuration, otherwise by its files; None if unknown."""
    model, _ = base_of(model)
    if not model.repository:
        return None
    folder = fetch(model.repository, model.revision, hub_token(model), needs_weights=True)
    settings = read_config(folder)
    setting = settings.get("dtype") or settings.get("torch_dtype") or ""
    dtype_name = str(setting).removeprefix("torch.")
    if dtype_name in _DTYPES:
        return dtype_name
    sizes: Counter[str] = Counter()
    for tensor in meta_tensors(folder, model.repository).values():
        dtype_name = str(tensor.dtype).removeprefix("torch.")
        if dtype_name in _DTYPES:
            sizes[dtype_name] += tensor.numel()
    for dtype_name, _ in sizes.most_common(1):
        return dtype_name
    return None


def _brought_along(trained_model: Model, task_name: str) -> dict[str, Any]:
    """Return the keys of a run's own factory, and of its loss if that is of the same task."""
    names = ["factory", "factory_options"]
    if find_task(trained_model.type).name == find_task(task_name).name:
        names += ["loss", "loss_options"]
    return {name: getattr(trained_model, name) for name in names}


def _replace(directory: Path, new_folder: Path, old_folder: Path) -> None:
    """Replace a folder by a new one."""
    if directory.exists():
        directory.rename(old_folder)
    new_folder.rename(directory)


def _save(network: PreTrainedModel, model: Model, preprocessor: Any | None, folder: Path) -> None:
    """Write a whole model with its task, and tokenizer or image processor."""
    disable_progress_bar()  # A progress bar would show even for a single file.
    network.save_pretrained(folder)
    _write_task(folder, model, {})
    if preprocessor is not None:
        save_flat(preprocessor, folder)
        remove_source(folder)


def _save_adapter(
    network: PreTrainedModel, model: Model, preprocessor: Any | None, folder: Path, final_folder: Path
) -> None:
    """Write an adapter with its task, and with names and kind of its classes, which the base model doesn't know."""
    folder.mkdir(parents=True)
    keys: dict[str, Any] = {}
    base = save_adapter(network, model, folder, final_folder)
    if base is not None:
        keys[BASE] = base
    if model.config:
        labels = {name: getattr(network.config, name) for name in _LABELS}
        keys["labels"] = {name: value for name, value in labels.items() if value is not None}
    _write_task(folder, model, keys)
    if network.can_generate():
        network.generation_config.save_pretrained(folder)
    if preprocessor is not None:
        save_flat(preprocessor, folder)
        remove_source(folder)


def _write_task(folder: Path, model: Model, keys: Mapping[str, Any]) -> None:
    """Write a model's task into its folder, its tensors if the job names them, and further keys."""
    content: dict[str, Any] = {"type": find_task(model.type).name}
    if model.input_names is not None:
        content["input_names"] = list(model.input_names)
    content |= keys
    (folder / TASK).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_task(folder: Path, task_name: str | None) -> dict[str, Any]:
    """Return the keys of `[model]` for a saved model's task: as in its folder, unless another task is named."""
    content = None
    with suppress(OSError, ValueError):
        content = json.loads((folder / TASK).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("type") not in TASKS:
        base, _ = base_of(Model(repository=str(folder)))
        base_folder = fetch(str(base.repository), base.revision, None)
        return {"type": task_name or infer_task(base_folder).name}
    if task_name is not None and find_task(task_name).name != content["type"]:
        return {"type": task_name}
    return {name: content[name] for name in ("type", "input_names") if name in content}


def remove_source(folder: Path) -> None:
    """Remove the source of a saved tokenizer from its settings."""
    file = folder / "tokenizer_config.json"
    if file.is_file():
        settings = _read(file)
        _write(file, {name: value for name, value in settings.items() if name not in _SOURCE_KEYS})


def make_compatible(folder: Path) -> None:
    """Rewrite the settings in a model's folder, and in its adapter's, so that transformers 4 reads them correctly.

    Keys of release 5 that are harmless stay, so release 5 reads the folder as before.
    """
    for path in (folder, *folder.iterdir()):
        config_file = path / "config.json"
        if config_file.is_file():
            _write(config_file, _older_config(_read(config_file)))
        tokenizer_file = path / "tokenizer_config.json"
        if tokenizer_file.is_file():
            _write(tokenizer_file, _older_tokenizer(_read(tokenizer_file)))


def _older_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, and those within it, with the keys of release 4 added."""
    older: dict[str, Any] = {}
    for name, value in settings.items():
        is_config = name.endswith("_config") and isinstance(value, Mapping)
        older[name] = _older_config(value) if is_config else value
    if "dtype" in older:
        older["torch_dtype"] = older["dtype"]
    rope = older.get("rope_parameters")
    if isinstance(rope, Mapping):
        rope_by_attention = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
        older |= _older_rope(rope_by_attention.get("full_attention", rope))
        sliding = rope_by_attention.get("sliding_attention", {})
        if "rope_theta" in sliding:
            older["rope_local_base_freq"] = sliding["rope_theta"]
    return older


def _older_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of rotary positions under their names of release 4."""
    older: dict[str, Any] = {}
    scaling: dict[str, Any] = {}
    for name, value in rope.items():
        if name not in _ROTARY:
            scaling[name] = value
    for name in _ROTARY:
        if name in rope:
            older[name] = rope[name]
    older["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
    return older


def _older_tokenizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    older = {name: value for name, value in settings.items() if name not in (*_SOURCE_KEYS, "backend")}
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = "PreTrainedTokenizerFast"
    special_tokens = older.get("extra_special_tokens")
    if isinstance(special_tokens, list):
        del older["extra_special_tokens"]
        older["additional_special_tokens"] = special_tokens
    return older


def _read(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return settings


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
