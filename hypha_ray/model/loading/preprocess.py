"""Tokenizers and image processors: lookup and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import CheckpointError, reason_of
from hypha_ray.model.loading.hub import base_of, fetch, hub_token, remote_code_allowed
from hypha_ray.model.task import SpecialTokens

_FILES = ("processor_config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")


def load_preprocessor(preprocessor: Preprocessor, dataset: Path | None, model: Model) -> Any | None:
    """Load a job's tokenizer or image processor.

    It comes from `preprocessor.repository`, otherwise from the dataset, otherwise from the model's repository. For an
    adapter without one it comes from the base model.

    Args:
        preprocessor: table of the job file.
        dataset: folder of the prepared dataset, which is searched with its subfolders; None: not on this machine.
        model: table of the job file.

    Returns:
        Object with `save_pretrained`; None if there is no preprocessor.

    Raises:
        CheckpointError: files in `preprocessor.repository` are missing, or any files are damaged.
        HyphaError: a hub refuses or can't be reached.

    """
    token = hub_token(model)
    trusted = remote_code_allowed(model.trust_remote_code)
    if preprocessor.repository:
        return _load(fetch(preprocessor.repository, preprocessor.revision, token, code=trusted), trusted)
    if dataset is not None:
        for folder in _folders(dataset):
            if _has_preprocessor(folder):
                return _load(folder, trusted=False)
    if not model.repository:
        return None
    base, _ = base_of(model)
    for table in (model, base):
        folder = fetch(str(table.repository), table.revision, token, code=trusted)
        if _has_preprocessor(folder):
            return _load(folder, trusted)
    return None


def load_special_tokens(preprocessor: Preprocessor, dataset: Path | None, model: Model) -> SpecialTokens | None:
    """Return the special tokens of a job's tokenizer; None if it has none.

    Raises:
        HyphaError: any error of `load_preprocessor`.

    """
    loaded = load_preprocessor(preprocessor, dataset, model)
    tokenizer: Any = getattr(loaded, "tokenizer", loaded)
    if not hasattr(tokenizer, "all_special_ids"):
        return None
    return SpecialTokens(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids))


def _folders(dataset: Path) -> list[Path]:
    """Return a dataset's folder and its subfolders; none on a machine without the dataset."""
    if not dataset.is_dir():
        return []
    subfolders = sorted(child for child in dataset.iterdir() if child.is_dir())
    return [dataset, *subfolders]


def _has_preprocessor(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _FILES)


def _load(folder: Path, trusted: bool) -> Any:
    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as error:  # Tokenizers raise anything from KeyError to exceptions of their Rust code.
        raise CheckpointError(
            "MODEL011",
            f"tokenizer or image processor in {folder} can't be loaded",
            reason_of(error),
            fix="name one in preprocessor.repository",
        ) from error
