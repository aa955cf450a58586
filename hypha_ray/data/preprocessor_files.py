"""Files of the tokenizer or image processor that lies beside a dataset's slices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

LARGEST_BYTES = 100_000_000
"""Largest size of a file that counts as one of a preprocessor; tokenizers have tens of megabytes at most."""


def preprocessor_files(folder: Path) -> dict[str, bytes]:
    """Files of a dataset's folder and its subfolders that are neither slices nor hidden, by path in the folder."""
    found = [*folder.glob("*"), *folder.glob("*/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if _belongs(path, folder)}


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files to a folder; a name that leads out of it is passed over.

    Raises:
        OSError: the folder can't be written.

    """
    for name, content in files.items():
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def same_tokens(one: Path, other: Path) -> bool:
    """Whether no number is another token in the other one of two saved tokenizers.

    Special tokens, which models of one family rename, don't count. Without `tokenizer.json` tokens aren't known, and
    nothing differs.
    """
    known = _tokens(one)
    found = _tokens(other)
    return all(known[number] == found[number] for number in known.keys() & found.keys())


def _tokens(folder: Path) -> dict[int, str]:
    try:
        file = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = file["model"]["vocab"]
        special = {token["id"] for token in file["added_tokens"]}
        ids = (
            vocabulary.items()
            if isinstance(vocabulary, dict)
            else ((token, number) for number, (token, _) in enumerate(vocabulary))
        )
        return {number: token for token, number in ids if number not in special}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _belongs(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return path.is_file() and not hidden and path.suffix != ".safetensors" and path.stat().st_size <= LARGEST_BYTES
