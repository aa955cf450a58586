"""Folders of models as transformers 4 reads them: release 5 renamed settings, which 4 passes over without a word.

rope_parameters                 ──► rope_theta, rope_scaling, partial_rotary_factor, rope_local_base_freq
tokenizer_class of release 5    ──► PreTrainedTokenizerFast
extra_special_tokens, a list    ──► additional_special_tokens
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

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
