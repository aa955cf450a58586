"""Slices: safetensors files whose tensors have samples along the first dimension.

A file is read into memory as a whole, never mapped: a mapped file that shrinks kills the process. The container is
checked before parsing and the content afterwards: safetensors itself accepts NaN, no tensors at all, and a header that
takes seconds to parse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.errors import DataError
from hypha_ray.types import SliceInfo

Arrays: TypeAlias = dict[str, npt.NDArray[np.generic]]
"""Arrays of a slice by tensor name; the first dimension counts samples."""

_Position: TypeAlias = tuple[str, np.dtype[Any], tuple[int, ...], int]
"""Name, dtype and shape of a tensor, and its first byte in a file."""

MAX_HEADER_BYTES = 1 << 20
"""Enough for 16 000 tensors; the header of a usual slice has less than a kilobyte."""

UNREADABLE = "DATA010"
"""Error code for a file that is missing or unreadable, so that its content is unknown."""
_AGAIN = "copy the file again, or prepare the dataset again with --overwrite"
_CONVERT = "save the tensors with safetensors.numpy.save_file or safetensors.torch.save_file"
_FOREIGN = (
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the content with `git lfs pull`"),
    (b"PK\x03\x04", "a zip archive, as torch.save and numpy.savez write it", _CONVERT),
    (b"\x80", "a pickle, which is never opened", _CONVERT),
    (b"\x93NUMPY", "a numpy file", _CONVERT),
    (b"<", "a web page", "download the file itself"),
)


def read_slice(folder: Path, info: SliceInfo, manifest: Manifest) -> Arrays:
    """Read a slice and check it against its manifest: checksum, tensors, dtypes, samples and bounds.

    Raises:
        DataError: the file is missing or damaged, or differs from the manifest.

    """
    return decode_slice(read_slice_file(folder, info), info, manifest)


def read_slice_file(folder: Path, info: SliceInfo) -> bytes:
    """The bytes of a slice's file, of which only the container is checked.

    Raises:
        DataError: the file is missing, or isn't one of safetensors.

    """
    return read_file(folder / info.file, _place(info))


def decode_slice(data: bytes, info: SliceInfo, manifest: Manifest) -> Arrays:
    """The tensors in a slice's file, checked against the manifest as in `read_slice`.

    Raises:
        DataError: the file is damaged, or differs from the manifest.

    """
    where = _place(info)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != info.sha256:
        fix = f"{_AGAIN}; if you changed it on purpose in a folder of your own, delete manifest.json"
        raise DataError("DATA016", f"{where}: the sha256 isn't the manifest's", sha256, info.sha256, fix)
    arrays = parse(data, where)
    samples, tensors = describe(arrays, where)
    if samples != info.samples:
        raise DataError("DATA018", f"{where}: wrong number of samples", str(samples), str(info.samples), _AGAIN)
    _check_bounds(tensors, merge(manifest.tensors, tensors, where), manifest.tensors, where)
    return arrays


class SliceChecker:
    """Checks a dataset's slices by a fast hash, which is the manifest's, or known from a check in full.

    Then tensors are views of the file's bytes: content and places of the tensors were checked when the hash was taken.

    The hash is XXH3 of 128 bits, which takes a tenth of the time of sha256. Damage changes either as surely. Only bytes
    that are forged on purpose might keep it, and a forger of files beside a manifest could have forged the manifest.

    Args:
        near: whether slices lie beside their manifest on this machine, so that its fast hashes are believed. Otherwise
            each slice is checked in full when it is read first.

    """

    def __init__(self, near: bool) -> None:
        self._near = near
        self._checked: dict[int, tuple[str, list[_Position]]] = {}
        """Fast hash of each slice that was checked, and the positions of its tensors, by its index."""

    def decode(self, data: bytes, info: SliceInfo, manifest: Manifest) -> Arrays:
        """The tensors in a slice's file, as `decode_slice` gives them, but read-only.

        Raises:
            DataError: the file is damaged, or differs from the manifest.

        """
        digest, (known, positions) = fast_hash(data, info.sha256), self._checked.get(info.index, ("", []))
        if known != digest:
            positions = self._positions(data, digest, info, manifest)
            self._checked[info.index] = digest, positions
        return {name: np.ndarray(shape, dtype, data, start) for name, dtype, shape, start in positions}

    def _positions(self, data: bytes, digest: str, info: SliceInfo, manifest: Manifest) -> list[_Position]:
        """Positions of the tensors in a file that is read first."""
        if self._near and info.xxh3 == digest:
            # What is wrong with a manifest is told by the check in full.
            with suppress(ValueError, LookupError, TypeError):
                return _positions(data, info, manifest)
        decode_slice(data, info, manifest)
        return _positions(data, info, manifest)


def _positions(data: bytes, info: SliceInfo, manifest: Manifest) -> list[_Position]:
    """Positions of the tensors in the bytes of a file, by its header.

    Raises:
        ValueError, LookupError, TypeError: the header isn't one of a file with the manifest's tensors.

    """
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    positions = list[_Position]()
    size = info.samples * manifest.sample_bytes
    if header.keys() - {"__metadata__"} != manifest.shapes.keys() or length + size != len(data):
        raise ValueError("other tensors, or another size")
    for tensor in manifest.tensors:
        dtype = np.dtype(tensor.dtype)
        shape = (info.samples, *tensor.shape)
        entry = header[tensor.name]
        kind = "BOOL" if dtype.kind == "b" else f"{dtype.kind.upper()}{8 * dtype.itemsize}"
        start, stop = entry["data_offsets"]
        fits = 0 <= start <= stop <= size and stop - start == info.samples * tensor.sample_bytes
        if not fits or [kind, list(shape)] != [entry["dtype"], entry["shape"]]:
            raise ValueError("another dtype or shape")
        positions.append((tensor.name, dtype, shape, length + start))
    return positions


def _place(info: SliceInfo) -> str:
    return f"slice {info.index} ({info.file})"


def write_slice(folder: Path, index: int, split: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> SliceInfo:
    """Write ``slice-<index>.safetensors``."""
    data = safetensors.numpy.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    file = f"slice-{index:05d}.safetensors"
    (folder / file).write_bytes(data)
    return listed(index, file, data, len(next(iter(arrays.values()))), split)


def listed(index: int, file: str, data: bytes, samples: int, split: str) -> SliceInfo:
    """A file as a manifest lists it, with the hashes of its bytes."""
    sha256 = hashlib.sha256(data).hexdigest()
    return SliceInfo(index, file, sha256, samples, split, fast_hash(data, sha256))


def fast_hash(data: bytes, sha256: str) -> str:
    """XXH3 of 128 bits in hexadecimal, seeded by the sha256 of the bytes, so that it is wrong beside a wrong sha256."""
    return xxhash.xxh3_128_hexdigest(data, seed=xxhash.xxh3_64_intdigest(sha256.encode()))


def read_file(path: Path, where: str) -> bytes:
    """The bytes of a file with the container format of safetensors.

    Raises:
        DataError: it can't be read, or has another format.

    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(UNREADABLE, f"{where}: can't be read", error.strerror or str(error), fix=_AGAIN) from None
    return container(data, where)


def container(data: bytes, where: str) -> bytes:
    """The same bytes, once they are known to have the container format of safetensors.

    Raises:
        DataError: they have another format, or are cut off.

    """
    length = int.from_bytes(data[:8], "little")
    brace = data[8:9] == b"{"
    if brace and length <= min(MAX_HEADER_BYTES, len(data) - 8):
        return data
    if len(data) <= 8 or (brace and length <= MAX_HEADER_BYTES):
        raise DataError("DATA012", f"{where}: the file is cut off", f"{len(data)} bytes", fix=_AGAIN)
    for magic, kind, fix in _FOREIGN:
        if data.startswith(magic) and not brace:
            raise DataError("DATA011", f"{where}: not a safetensors file", kind, "safetensors", fix)
    if brace:
        found = f"{length} bytes"
        allowed = f"{MAX_HEADER_BYTES} bytes"
        raise DataError("DATA013", f"{where}: the header is too long", found, allowed, _CONVERT)
    raise DataError("DATA011", f"{where}: not a safetensors file", "another format", "safetensors", _CONVERT)


def parse(data: bytes, where: str) -> Arrays:
    """The tensors of a safetensors file.

    Raises:
        DataError: header and content don't fit together, or numpy lacks a dtype.

    """
    try:
        return dict(safetensors.numpy.load(data))
    except SafetensorError as error:
        raise DataError("DATA014", f"{where}: header and content don't fit", str(error), fix=_AGAIN) from None
    except KeyError as error:
        found = str(error.args[0])
        allowed = "whole numbers, bool, or float16 to float64"
        raise DataError("DATA019", f"{where}: a tensor has a dtype that slices can't have", found, allowed) from None


def describe(arrays: Arrays, where: str) -> tuple[int, tuple[TensorInfo, ...]]:
    """Number of samples, and a description of the tensors sorted by name.

    Raises:
        DataError: the tensors aren't samples of finite numbers.

    """
    if not arrays:
        raise DataError("DATA017", f"{where}: no tensors", fix="save at least one, such as input_ids [N, seq_len]")
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        found = ", ".join(f"{name} {list(arrays[name].shape)}" for name in sorted(arrays))
        allowed = "one number of samples, at least 1, as every tensor's first dimension"
        raise DataError("DATA018", f"{where}: tensors disagree on the number of samples", found, allowed)
    return next(iter(lengths.values())), tuple(_describe(name, arrays[name], where) for name in sorted(arrays))


def _describe(name: str, array: npt.NDArray[np.generic], where: str) -> TensorInfo:
    kind = array.dtype.kind
    shape = array.shape[1:]
    if kind not in "biuf" or (name == "input_ids" and (kind not in "iu" or not shape)):
        allowed = "whole numbers [N, seq_len]" if name == "input_ids" else "whole numbers, bool or floats"
        raise DataError("DATA019", f"{where}: {name} has the wrong dtype or shape", f"{array.dtype} {shape}", allowed)
    if 0 in shape:
        raise DataError(
            "DATA018", f"{where}: {name} is empty", str(list(array.shape)), "samples of at least one number"
        )
    if kind == "f":
        # The extremes of an array with a NaN are NaN: this takes two passes, but no mask as large as the data.
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise DataError("DATA021", f"{where}: {name} isn't finite", "NaN or infinity", "finite numbers")
        return TensorInfo(name, array.dtype.name, shape)
    numbers = array.view(np.uint8) if kind == "b" else array
    minimum = int(numbers.min())
    maximum = int(numbers.max())
    if (kind == "b" and maximum > 1) or (name == "input_ids" and minimum < 0):
        raise DataError("DATA020", f"{where}: {name} is out of bounds", f"{minimum} … {maximum}", "0 and up")
    return TensorInfo(name, array.dtype.name, shape, minimum, maximum)


def merge(known: tuple[TensorInfo, ...], found: tuple[TensorInfo, ...], where: str) -> tuple[TensorInfo, ...]:
    """The tensors of two slices of a dataset, with bounds that cover both.

    Raises:
        DataError: they differ in names, dtypes or shapes.

    """
    if [(t.name, t.dtype, t.shape) for t in known] != [(t.name, t.dtype, t.shape) for t in found]:
        fix = "prepare all slices in the same way: same tensors, same sequence length or image size, same dtype"
        raise DataError("DATA017", f"{where}: tensors differ from the dataset's", _text(found), _text(known), fix)
    return tuple(_union(a, b) for a, b in zip(known, found, strict=True))


def _union(a: TensorInfo, b: TensorInfo) -> TensorInfo:
    if a.minimum is None or a.maximum is None or b.minimum is None or b.maximum is None:
        return a
    return replace(a, minimum=min(a.minimum, b.minimum), maximum=max(a.maximum, b.maximum))


def _check_bounds(
    found: tuple[TensorInfo, ...], union: tuple[TensorInfo, ...], known: tuple[TensorInfo, ...], where: str
) -> None:
    for got, both, allowed in zip(found, union, known, strict=True):
        if both != allowed:
            got_range, allowed_range = (f"{tensor.minimum} … {tensor.maximum}" for tensor in (got, allowed))
            raise DataError("DATA020", f"{where}: {got.name} is out of bounds", got_range, allowed_range, _AGAIN)


def _text(tensors: tuple[TensorInfo, ...]) -> str:
    return ", ".join(f"{tensor.name} {tensor.dtype} [N{''.join(f', {n}' for n in tensor.shape)}]" for tensor in tensors)
