"""Preparation of small datasets, and views of what was prepared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hypha_ray.data.catalogue import load
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import Arrays, read_slice

CHATML = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}\n{{ m.content }}<extra_id_1>\n{% endfor %}"
    "{% if add_generation_prompt %}<extra_id_0>assistant\n{% endif %}"
)
"""A template of chats for the tokenizer of bytes."""


def prepared(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepare(PrepareOptions(str(source), out, **options), lambda what, number: None)


def table(path: Path, *rows: Mapping[str, Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arrays_of(out: Path, split: str = "train") -> Arrays:
    """All samples of a split; no arrays if it has none."""
    manifest = load(out)
    parts = [read_slice(out, info, manifest) for info in manifest.of(split)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts else {}


def omissions(manifest: Manifest) -> dict[str, int]:
    """Number of each kind of thing that was left out."""
    assert manifest.origin is not None
    return {f"{one.what} {one.reason}": one.count for one in manifest.origin.omissions}
