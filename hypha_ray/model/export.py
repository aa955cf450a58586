"""A snapshot as a folder that `from_pretrained` loads."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

from hypha_ray.config.schema import Model
from hypha_ray.errors import CheckpointError
from hypha_ray.model.build import build_model
from hypha_ray.model.configuration import saved_settings
from hypha_ray.model.flat import Array
from hypha_ray.model.hub import fetch
from hypha_ray.model.layout import layout_of, load
from hypha_ray.model.saved import note_task
from hypha_ray.model.weights import stored
from hypha_ray.modes import make_tree_private

_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})


def export(
    model: Model,
    preprocessor: Any | None,
    tensors: Mapping[str, Array],
    directory: Path,
    seed: int = 0,
    dtype: str | None = None,
) -> None:
    """Write weights, configuration, and tokenizer or image processor, for transformers to load.

    The folder appears whole or not at all; one that is already there is replaced.

    Args:
        model: table of the job file; the repository, if it names one, is read again for frozen parameters.
        preprocessor: as `load_preprocessor` returns it.
        tensors: trained tensors by name, as `layout.views` gives them.
        directory: folder to write.
        seed: the run's, for frozen parameters of a model that began with random weights.
        dtype: of the weights in the folder, by torch's name; None: as repository or configuration has it.

    Raises:
        CheckpointError: the tensors don't fit the model, or the folder can't be written.
        HyphaError: the model can't be built.

    """
    network = build_model(model, seed)
    if (wanted := dtype or original_dtype(model)) is not None:
        network = network.to(getattr(torch, wanted))
    load(network, layout_of(network), tensors)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
            new = Path(scratch) / "new"
            disable_progress_bar()  # It would show one for a single file.
            network.save_pretrained(new)
            note_task(new, model)
            if preprocessor is not None:
                preprocessor.save_pretrained(new)
            make_tree_private(new)
            _replace(directory, new, Path(scratch) / "old")
    except (OSError, SafetensorError) as error:
        raise CheckpointError("MODEL013", f"model folder {directory} can't be written", str(error)) from error


def original_dtype(model: Model) -> str | None:
    """Return what a repository's weights are saved in, by its configuration or else its files; None without one."""
    if not model.repository:
        return None
    token = model.token.get_secret_value() if model.token else None
    folder = fetch(model.repository, model.revision, token, weights=True)
    settings = saved_settings(folder)
    named = str(settings.get("dtype") or settings.get("torch_dtype") or "").removeprefix("torch.")
    if named in _DTYPES:
        return named
    sizes: Counter[str] = Counter()
    for tensor in stored(folder, model.repository).values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    floats = [name for name, _ in sizes.most_common() if name in _DTYPES]
    return floats[0] if floats else None


def _replace(directory: Path, new: Path, old: Path) -> None:
    """Put a new folder in a folder's place."""
    if directory.exists():
        directory.rename(old)
    new.rename(directory)
