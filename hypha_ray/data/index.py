"""A folder of bare ``*.safetensors`` files as a dataset, whose manifest is made on first use."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from hypha_ray.data.manifest import Manifest, Modality, TensorInfo
from hypha_ray.data.provenance import readable
from hypha_ray.data.slices import describe, listed, merge, parse, read_file
from hypha_ray.types import SliceInfo

_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test)([^a-z]|$)")


def index(folder: Path, files: Iterable[Path]) -> Manifest:
    """Read and check every file, and save the result as the folder's manifest if the folder is writable.

    Files are sorted by name. Files with the word val, valid, validation or test in their name form the validation
    split, unless that would be all files.

    Raises:
        DataError: a file isn't a slice, or differs from the others.

    """
    ordered = sorted(files, key=lambda file: file.name)
    held_out = {file for file in ordered if _HELD_OUT.search(file.stem.lower())}
    if len(held_out) == len(ordered):
        held_out = set()
    slices: list[SliceInfo] = []
    tensors: tuple[TensorInfo, ...] = ()
    for number, file in enumerate(ordered):
        where = f"slice {number} ({file.name})"
        data = read_file(file, where)
        samples, found = describe(parse(data, where), where)
        tensors = merge(tensors or found, found, where)
        split = "validation" if file in held_out else "train"
        slices.append(listed(number, file.name, data, samples, split))
    name = readable(folder.resolve().name)
    manifest = Manifest(name=name, modality=modality_of(tensors), slices=tuple(slices), tensors=tensors)
    with contextlib.suppress(OSError):
        manifest.save(folder)
    return manifest


def modality_of(tensors: tuple[TensorInfo, ...]) -> Modality:
    """Return the modality of a dataset by the names of its tensors."""
    names = {tensor.name for tensor in tensors}
    if names & {"images", "pixel_values"}:
        return "vision"
    if "input_ids" in names:
        return "prompts" if "reward_data" in names else "language"
    return "other"
