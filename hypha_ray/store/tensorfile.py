"""Safetensors files whose bytes depend on their tensors only.

The library copies all tensors to write them, and promises no order; here the same tensors give the same file on every
machine, so its sha256 names them, and that can be had without writing the file at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

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
"""Safetensors' names of numpy's dtypes, widest first."""


def digest(tensors: Mapping[str, Array]) -> str:
    """Sha256 of the file that `write` would write."""
    total = hashlib.sha256()
    for chunk in _chunks(tensors):
        total.update(chunk)
    return total.hexdigest()


def write(path: Path, tensors: Mapping[str, Array]) -> str:
    """Write tensors to a file, wait until the disk has them, and return the sha256 of its bytes.

    Wide dtypes come before narrow ones, so that all are aligned; else the order is that of the mapping.
    """
    total = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _chunks(tensors):
            total.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return total.hexdigest()


def read(path: Path) -> dict[str, Array]:
    """Read all tensors of a file."""
    tensors: dict[str, Array] = load_file(path)
    return tensors


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _chunks(tensors: Mapping[str, Array]) -> Iterator[memoryview | bytes]:
    """Return the file's bytes: length of the header, header, and the tensors one after the other."""
    ranks = list(_DTYPES)
    ordered = sorted(tensors.items(), key=lambda item: ranks.index(item[1].dtype.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        kind = _DTYPES[tensor.dtype.name]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
