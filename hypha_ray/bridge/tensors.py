"""Reading of tensors from the other side: exactly the expected set, or an error with the difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from hypha_ray.errors import BridgeError

Array: TypeAlias = npt.NDArray[Any]

MAX_HEADER_BYTES = 8 << 20
_HEADER_BYTES = 512
"""Bytes of the header for one tensor, without its name."""


def read(path: Path, expected: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Array]:
    """Read a private safetensors file, which no other process may change meanwhile.

    Args:
        path: the file.
        expected: numpy's name of the dtype, and the shape, of every tensor; no other tensors are allowed.

    Raises:
        BridgeError: DLT001 not a safetensors file, DLT002 other tensors, DLT003 another shape, DLT004 another dtype.

    """
    header_bytes = sum(_HEADER_BYTES + len(name) for name in expected)
    _check_header(path, header_bytes)
    try:
        with safe_open(path, framework="numpy") as file:
            _check_names(set(file.keys()), set(expected))
            for name, (_, shape) in expected.items():
                tensor = file.get_slice(name)
                file_shape = tuple(tensor.get_shape())
                if file_shape != shape:
                    raise BridgeError("DLT003", f"{name} has another shape", got=str(file_shape), allowed=str(shape))
            tensors = {name: file.get_tensor(name) for name in expected}
    except SafetensorError as error:
        raise BridgeError("DLT001", "not a safetensors file", got=str(error)[:100]) from None
    except (TypeError, AttributeError, KeyError) as error:  # A dtype that numpy doesn't have.
        raise BridgeError("DLT004", "an unexpected dtype", got=str(error)[:100]) from None
    for name, (dtype, _) in expected.items():
        if tensors[name].dtype.name != dtype:
            raise BridgeError("DLT004", f"{name} has another dtype", got=tensors[name].dtype.name, allowed=dtype)
    return tensors


def _check_header(path: Path, expected_bytes: int) -> None:
    """Check the length of the header before parsing it."""
    limit = min(MAX_HEADER_BYTES, 4 * expected_bytes + 1024)
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or length > limit:
        raise BridgeError("DLT001", "not a safetensors file", got=repr(start), allowed=f"a header of {limit} bytes")


def _check_names(names: set[str], expected: set[str]) -> None:
    for wrong_names, problem in ((expected - names, "is missing"), (names - expected, "is unexpected")):
        if wrong_names:
            first_name = min(wrong_names)[:80]
            raise BridgeError("DLT002", f"a tensor {problem}", got=f"{first_name!r} and {len(wrong_names) - 1} more")
