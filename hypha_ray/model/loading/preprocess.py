"""Tokenizers and image processors: where one is found, and how it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from hypha_ray.config.schema import Model, Preprocessor
from hypha_ray.errors import CheckpointError
from hypha_ray.model.loading.hub import fetch, remote_code_allowed
from hypha_ray.model.tasks.masking import SpecialTokens

_FILES = ("processor_config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json")


def load_preprocessor(preprocessor: Preprocessor, dataset: Path | None, model: Model) -> Any | None:
    """Load the tokenizer or image processor that belongs to a job.

    It is the one of `preprocessor.repository`; without that the one beside the dataset, else the model repository's.

    Args:
        preprocessor: table of the job file.
        dataset: folder of the prepared dataset, if it is at hand; the folders in it are looked into too.
        model: table of the job file.

    Returns:
        Something with `save_pretrained`, or None where there is none to be found.

    Raises:
        CheckpointError: its files are missing from `preprocessor.repository`, or damaged.
        HyphaError: a hub refuses or can't be reached, as for a model.

    """
    token = model.token.get_secret_value() if model.token else None
    trusted = remote_code_allowed(model.trust_remote_code)
    if preprocessor.repository:
        return _load(fetch(preprocessor.repository, preprocessor.revision, token, code=trusted), trusted)
    if dataset is not None and (beside := next(filter(_has_one, _folders(dataset)), None)):
        return _load(beside, trusted=False)
    if model.repository and _has_one(folder := fetch(model.repository, model.revision, token, code=trusted)):
        return _load(folder, trusted)
    return None


def load_special_tokens(preprocessor: Preprocessor, dataset: Path | None, model: Model) -> SpecialTokens | None:
    """Return the special tokens of what `load_preprocessor` loads; None where there is no tokenizer.

    Raises:
        HyphaError: as `load_preprocessor`.

    """
    found = load_preprocessor(preprocessor, dataset, model)
    tokenizer: Any = getattr(found, "tokenizer", found)
    if not hasattr(tokenizer, "all_special_ids"):
        return None
    return SpecialTokens(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids))


def _folders(dataset: Path) -> list[Path]:
    """Return a dataset's folder and those in it; none on a machine that hasn't got the dataset."""
    return [dataset, *sorted(child for child in dataset.iterdir() if child.is_dir())] if dataset.is_dir() else []


def _has_one(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _FILES)


def _load(folder: Path, trusted: bool) -> Any:
    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as error:  # tokenizers raise anything from KeyError to the exceptions of their Rust code
        raise CheckpointError(
            "MODEL011",
            f"tokenizer or image processor in {folder} can't be loaded",
            " ".join(f"{type(error).__name__}: {error}".split())[:300],
            fix="name one in preprocessor.repository",
        ) from error
