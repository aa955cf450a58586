"""Folder of a trained model for `from_pretrained`: written with its task in a file, and opened for evaluation.

Release 5 of transformers renamed settings, which release 4 ignores without a word. For it a folder is rewritten:

rope_parameters                 ──► rope_theta, rope_scaling, partial_rotary_factor, rope_local_base_freq
tokenizer_class of release 5    ──► PreTrainedTokenizerFast
extra_special_tokens, a list    ──► additional_special_tokens
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from hypha_ray.config.schema import Job, Model, Preprocessor
from hypha_ray.errors import CheckpointError
from hypha_ray.files import make_tree_private
from hypha_ray.model.flat import Array
from hypha_ray.model.layout import layout_of, load
from hypha_ray.model.loading.build import build_model, infer_task, task_of
from hypha_ray.model.loading.folders import read_config
from hypha_ray.model.loading.hub import TASK, base_of, fetch
from hypha_ray.model.loading.preprocess import load_special_tokens
from hypha_ray.model.loading.weights import meta_tensors
from hypha_ray.model.lora import attach_adapter, has_adapter, merge_adapter, needs_whole, save_adapter
from hypha_ray.model.tasks.table import TASKS, find_task
from hypha_ray.model.tasks.task import Task
from hypha_ray.model.trained import build_trained, exported
from hypha_ray.model.vocabulary import settle_generation

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


OLDEST: Final = 4
"""Oldest release of transformers that a folder can be written for."""
_OF_THE_PLACE: Final = ("is_local", "local_files_only", "name_or_path")
"""Keys of a tokenizer's settings that tell where it was loaded from."""
_ROTARY: Final = ("rope_theta", "partial_rotary_factor")
"""Settings of positions that stand at the top in release 4."""


def forget_place(folder: Path) -> None:
    """Remove from a saved tokenizer's settings where it was loaded from."""
    file = folder / "tokenizer_config.json"
    if file.is_file():
        settings = _read(file)
        _write(file, {name: value for name, value in settings.items() if name not in _OF_THE_PLACE})


def make_compatible(folder: Path) -> None:
    """Rewrite the settings in a model's folder, and in its adapter's, so that transformers 4 reads them rightly.

    Keys of release 5 that are harmless stay, so release 5 reads the folder as before.
    """
    for file in (path for path in (folder, *folder.iterdir()) if path.is_dir()):
        if (file / "config.json").is_file():
            _write(file / "config.json", _older_config(_read(file / "config.json")))
        if (file / "tokenizer_config.json").is_file():
            _write(file / "tokenizer_config.json", _older_tokenizer(_read(file / "tokenizer_config.json")))


def _older_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, and those within it, with the names of release 4 besides."""
    found = {name: _older_config(value) if _is_config(name, value) else value for name, value in settings.items()}
    if "dtype" in found:
        found["torch_dtype"] = found["dtype"]
    rope = found.get("rope_parameters")
    if isinstance(rope, Mapping):
        kinds = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
        found |= _older_rope(kinds.get("full_attention", rope))
        if "sliding_attention" in kinds and "rope_theta" in kinds["sliding_attention"]:
            found["rope_local_base_freq"] = kinds["sliding_attention"]["rope_theta"]
    return found


def _is_config(name: str, value: Any) -> bool:
    return name.endswith("_config") and isinstance(value, Mapping)


def _older_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of rotary positions under their names of release 4."""
    found = {name: rope[name] for name in _ROTARY if name in rope}
    rest = {name: value for name, value in rope.items() if name not in _ROTARY}
    found["rope_scaling"] = None if rest.get("rope_type", "default") == "default" else rest
    return found


def _older_tokenizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in settings.items() if name not in (*_OF_THE_PLACE, "backend")}
    if found.get("tokenizer_class") == "TokenizersBackend":
        found["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := found.get("extra_special_tokens"), list):
        del found["extra_special_tokens"]
        found["additional_special_tokens"] = extra
    return found


def _read(file: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return settings


def _write(file: Path, settings: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
