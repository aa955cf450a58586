"""A tokenizer on its way to workers, whose machines may have neither its files nor the dataset's."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypha_ray.errors import ConfigError
from hypha_ray.model.tasks.masking import SpecialTokens


@dataclass(frozen=True, slots=True)
class PackedTokenizer(SpecialTokens):
    """A whole tokenizer, for workers that make texts of tokens."""

    files: tuple[tuple[str, bytes], ...]
    """Names and contents of its files."""

    def load(self) -> Any:
        """Build the tokenizer."""
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            for name, content in self.files:
                Path(folder, name).write_bytes(content)
            return AutoTokenizer.from_pretrained(folder)


def tokenizer_of(preprocessor: Any | None) -> Any:
    """Return the tokenizer that a preprocessor from `load_preprocessor` is or has.

    Raises:
        ConfigError: RL003, there is none.

    """
    tokenizer = getattr(preprocessor, "tokenizer", preprocessor)
    if not hasattr(tokenizer, "decode"):
        fix = "prepare the dataset with one, or name one in preprocessor.repository"
        raise ConfigError("RL003", "texts can't be made of responses: there is no tokenizer", fix=fix)
    return tokenizer


def pack(tokenizer: Any) -> PackedTokenizer:
    """Pack a tokenizer with all its files."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = tuple((path.name, path.read_bytes()) for path in sorted(Path(folder).iterdir()) if path.is_file())
    return PackedTokenizer(getattr(tokenizer, "mask_token_id", None), tuple(tokenizer.all_special_ids), files)
