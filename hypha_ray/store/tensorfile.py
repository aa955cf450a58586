"""Safetensors files whose bytes depend only on their tensors.

The safetensors library copies all tensors to write them, and guarantees no order. Here equal tensors give equal files,
on every machine. So a sha256 identifies tensors, and can be computed without writing the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from hypha_ray.store.disk import new_file
from hypha_ray.types import Flat, Layout
from hypha_ray.types.layout import dtype_of, is_trained

Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float16": "F16",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Safetensors' names of numpy dtypes, widest first."""


def digest(tensors: Mapping[str, Array]) -> str:
    """Sha256 of the file that `write` would write."""
    total = hashlib.sha256()
    for chunk in chunks(tensors):
        total.update(chunk)
    return total.hexdigest()


def write(path: Path, tensors: Mapping[str, Array]) -> str:
    """Write tensors to a file, fsync it, and return the sha256 of its bytes.

    Wide dtypes come before narrow ones, for alignment; otherwise the mapping's order is kept.
    """
    total = hashlib.sha256()
    with new_file(path) as file:
        for chunk in chunks(tensors):
            total.update(chunk)
            file.write(chunk)
    return total.hexdigest()


def read(path: Path) -> dict[str, Array]:
    """Read all tensors of a file."""
    tensors: dict[str, Array] = load_file(path)
    return tensors


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named(layout: Layout, flats: Sequence[Flat], kind: str = "") -> dict[str, Array]:
    """Views of the tensors by name; all of the layout, or those of a kind such as ``parameters/``."""
    tensors = {}
    for entry in layout.entries:
        if entry.group.startswith(kind):
            group = flats[entry.fragment][entry.group]
            tensors[entry.name] = group[entry.offset : entry.offset + entry.size].reshape(entry.shape)
    return tensors


def flattened(layout: Layout, tensors: Mapping[str, Array], kind: str = "") -> list[Flat]:
    """Copy tensors into new arrays, one for each fragment and group: the reverse of `named`."""
    flats: list[Flat] = []
    for fragment in range(layout.fragments):
        sizes = layout.groups(fragment)
        flats.append({group: np.empty(sizes[group], dtype_of(group)) for group in sizes if group.startswith(kind)})
    for entry in layout.entries:
        if entry.group.startswith(kind):
            group = flats[entry.fragment][entry.group]
            group[entry.offset : entry.offset + entry.size] = tensors[entry.name].ravel()
    return flats


def named_outer(layout: Layout, flats: Sequence[Flat]) -> dict[str, Array]:
    """Name outer momentum like the weights; other states get the fragment's number and their own name."""
    if all(flat.keys() == _trained_groups(layout, fragment) for fragment, flat in enumerate(flats)):
        return named(layout, flats, "parameters/")
    tensors = {}
    for fragment, flat in enumerate(flats):
        for name, array in flat.items():
            tensors[f"{fragment}/{name}"] = array
    return tensors


def flattened_outer(layout: Layout, tensors: Mapping[str, Array]) -> list[Flat]:
    """Reverse of `named_outer`."""
    trained = {entry.name for entry in layout.entries if is_trained(entry.group)}
    if tensors.keys() == trained:
        return flattened(layout, tensors, "parameters/")
    flats: list[Flat] = [{} for _ in range(layout.fragments)]
    for name, array in tensors.items():
        fragment, _, state_name = name.partition("/")
        flats[int(fragment)][state_name] = array
    return flats


def _trained_groups(layout: Layout, fragment: int) -> set[str]:
    return {group for group in layout.groups(fragment) if is_trained(group)}


def chunks(tensors: Mapping[str, Array], notes: Mapping[str, str] | None = None) -> Iterator[memoryview | bytes]:
    """Yield the file's bytes: length of the header and header, with `notes` in it, then the tensors one by one."""
    ranks = list(_DTYPES)
    names = sorted(tensors, key=lambda name: ranks.index(tensors[name].dtype.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(notes or {})}}
    start = 0
    for name in names:
        tensor = tensors[name]
        stop = start + tensor.nbytes
        kind = _DTYPES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = np.ascontiguousarray(tensors[name]).reshape(-1)
        yield flat.view(np.uint8).data
