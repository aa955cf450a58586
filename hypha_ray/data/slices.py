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
    return read_file(folder / info.file, _slice_name(info))


def decode_slice(data: bytes, info: SliceInfo, manifest: Manifest) -> Arrays:
    """The tensors in a slice's file, checked against the manifest as in `read_slice`.

    Raises:
        DataError: the file is damaged, or differs from the manifest.

    """
    slice_name = _slice_name(info)
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != info.sha256:
        fix = f"{_AGAIN}; if you changed it on purpose in a folder of your own, delete manifest.json"
        raise DataError("DATA016", f"{slice_name}: the sha256 isn't the manifest's", sha256, info.sha256, fix)
    arrays = parse(data, slice_name)
    samples, tensors = describe(arrays, slice_name)
    if samples != info.samples:
        raise DataError("DATA018", f"{slice_name}: wrong number of samples", str(samples), str(info.samples), _AGAIN)
    _check_bounds(tensors, manifest, slice_name)
    return arrays


class SliceChecker:
    """Checks a dataset's slices by a fast hash, which is the manifest's, or known from a check in full.

    Then tensors are views of the file's bytes, whose content and positions were checked when the hash was taken.

    The hash is XXH3 of 128 bits, which takes a tenth of the time of sha256. Damage changes either as surely. Only bytes
    that are forged on purpose might keep it, and a forger of files beside a manifest could have forged the manifest.

    Args:
        trusts_manifest: whether slices lie beside their manifest on this machine, so that its fast hashes are believed.
            Otherwise each slice is checked in full when it is read first.

    """

    def __init__(self, trusts_manifest: bool) -> None:
        self._trusts_manifest = trusts_manifest
        self._checked: dict[int, tuple[str, list[_Position]]] = {}
        """Fast hash of each slice that was checked, and the positions of its tensors, by its index."""

    def decode(self, data: bytes, info: SliceInfo, manifest: Manifest) -> Arrays:
        """The tensors in a slice's file, as `decode_slice` gives them, but read-only.

        Raises:
            DataError: the file is damaged, or differs from the manifest.

        """
        digest = fast_hash(data, info.sha256)
        checked_digest, positions = self._checked.get(info.index, ("", []))
        if checked_digest != digest:
            positions = self._check(data, digest, info, manifest)
            self._checked[info.index] = digest, positions
        return {name: np.ndarray(shape, dtype, data, start) for name, dtype, shape, start in positions}

    def _check(self, data: bytes, digest: str, info: SliceInfo, manifest: Manifest) -> list[_Position]:
        """Positions of the tensors in a file that is read for the first time."""
        if self._trusts_manifest and info.xxh3 == digest:
            # A wrong manifest fails the check in full below.
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
    size_bytes = info.samples * manifest.sample_bytes
    if header.keys() - {"__metadata__"} != manifest.shapes.keys() or length + size_bytes != len(data):
        raise ValueError("other tensors, or another size")
    for tensor in manifest.tensors:
        dtype = np.dtype(tensor.dtype)
        shape = (info.samples, *tensor.shape)
        entry = header[tensor.name]
        start, stop = entry["data_offsets"]
        if not 0 <= start <= stop <= size_bytes or stop - start != info.samples * tensor.sample_bytes:
            raise ValueError("another size")
        if entry["dtype"] != _header_dtype(dtype) or entry["shape"] != list(shape):
            raise ValueError("another dtype or shape")
        positions.append((tensor.name, dtype, shape, length + start))
    return positions


def _header_dtype(dtype: np.dtype[Any]) -> str:
    """Name of a dtype in a file's header."""
    if dtype.kind == "b":
        return "BOOL"
    return f"{dtype.kind.upper()}{8 * dtype.itemsize}"


def _slice_name(info: SliceInfo) -> str:
    return f"slice {info.index} ({info.file})"


def write_slice(folder: Path, index: int, split: str, arrays: Mapping[str, npt.NDArray[np.generic]]) -> SliceInfo:
    """Write ``slice-<index>.safetensors``."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = safetensors.numpy.save(contiguous)
    file = f"slice-{index:05d}.safetensors"
    (folder / file).write_bytes(data)
    first_array = next(iter(arrays.values()))
    return listed(index, file, data, len(first_array), split)


def listed(index: int, file: str, data: bytes, samples: int, split: str) -> SliceInfo:
    """Entry of a file in a manifest, with the hashes of its bytes."""
    sha256 = hashlib.sha256(data).hexdigest()
    return SliceInfo(index, file, sha256, samples, split, fast_hash(data, sha256))


def fast_hash(data: bytes, sha256: str) -> str:
    """XXH3 of 128 bits in hexadecimal, seeded by the sha256 of the bytes, so that it is wrong beside a wrong sha256."""
    seed = xxhash.xxh3_64_intdigest(sha256.encode())
    return xxhash.xxh3_128_hexdigest(data, seed=seed)


def read_file(path: Path, slice_name: str) -> bytes:
    """The bytes of a file with the container format of safetensors.

    Raises:
        DataError: it can't be read, or has another format.

    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(UNREADABLE, f"{slice_name}: can't be read", error.strerror or str(error), fix=_AGAIN) from None
    return container(data, slice_name)


def container(data: bytes, slice_name: str) -> bytes:
    """The same bytes, once they are known to have the container format of safetensors.

    Raises:
        DataError: they have another format, or are cut off.

    """
    length = int.from_bytes(data[:8], "little")
    has_header = data[8:9] == b"{"
    if has_header and length <= min(MAX_HEADER_BYTES, len(data) - 8):
        return data
    if len(data) <= 8 or (has_header and length <= MAX_HEADER_BYTES):
        raise DataError("DATA012", f"{slice_name}: the file is cut off", f"{len(data)} bytes", fix=_AGAIN)
    if has_header:
        got = f"{length} bytes"
        allowed = f"{MAX_HEADER_BYTES} bytes"
        raise DataError("DATA013", f"{slice_name}: the header is too long", got, allowed, _CONVERT)
    for magic, format_name, fix in _FOREIGN:
        if data.startswith(magic):
            raise DataError("DATA011", f"{slice_name}: not a safetensors file", format_name, "safetensors", fix)
    raise DataError("DATA011", f"{slice_name}: not a safetensors file", "another format", "safetensors", _CONVERT)


def parse(data: bytes, slice_name: str) -> Arrays:
    """The tensors of a safetensors file.

    Raises:
        DataError: header and content don't fit together, or numpy lacks a dtype.

    """
    try:
        return dict(safetensors.numpy.load(data))
    except SafetensorError as error:
        raise DataError("DATA014", f"{slice_name}: header and content don't fit", str(error), fix=_AGAIN) from None
    except KeyError as error:
        dtype = str(error.args[0])
        problem = f"{slice_name}: a tensor has a dtype that slices can't have"
        raise DataError("DATA019", problem, dtype, "whole numbers, bool, or float16 to float64") from None


def describe(arrays: Arrays, slice_name: str) -> tuple[int, tuple[TensorInfo, ...]]:
    """Number of samples, and a description of the tensors sorted by name.

    Raises:
        DataError: the tensors aren't samples of finite numbers.

    """
    if not arrays:
        raise DataError("DATA017", f"{slice_name}: no tensors", fix="save at least one, such as input_ids [N, seq_len]")
    names = sorted(arrays)
    lengths = set[int]()
    for array in arrays.values():
        lengths.add(len(array) if array.ndim else 0)
    if len(lengths) > 1 or 0 in lengths:
        shapes_text = ", ".join(f"{name} {list(arrays[name].shape)}" for name in names)
        allowed = "one number of samples, at least 1, as every tensor's first dimension"
        raise DataError("DATA018", f"{slice_name}: tensors disagree on the number of samples", shapes_text, allowed)
    tensors = [_describe(name, arrays[name], slice_name) for name in names]
    return lengths.pop(), tuple(tensors)


def _describe(name: str, array: npt.NDArray[np.generic], slice_name: str) -> TensorInfo:
    dtype_kind = array.dtype.kind
    shape = array.shape[1:]
    if name == "input_ids":
        is_allowed = dtype_kind in "iu" and bool(shape)
        allowed = "whole numbers [N, seq_len]"
    else:
        is_allowed = dtype_kind in "biuf"
        allowed = "whole numbers, bool or floats"
    if not is_allowed:
        problem = f"{slice_name}: {name} has the wrong dtype or shape"
        raise DataError("DATA019", problem, f"{array.dtype} {shape}", allowed)
    if 0 in shape:
        allowed = "samples of at least one number"
        raise DataError("DATA018", f"{slice_name}: {name} is empty", str(list(array.shape)), allowed)
    if dtype_kind == "f":
        # The extremes of an array with a NaN are NaN: this takes two passes, but no mask as large as the data.
        if not (np.isfinite(array.min()) and np.isfinite(array.max())):
            raise DataError("DATA021", f"{slice_name}: {name} isn't finite", "NaN or infinity", "finite numbers")
        return TensorInfo(name, array.dtype.name, shape)
    numbers = array.view(np.uint8) if dtype_kind == "b" else array
    minimum = int(numbers.min())
    maximum = int(numbers.max())
    if (dtype_kind == "b" and maximum > 1) or (name == "input_ids" and minimum < 0):
        raise DataError("DATA020", f"{slice_name}: {name} is out of bounds", f"{minimum} … {maximum}", "0 and up")
    return TensorInfo(name, array.dtype.name, shape, minimum, maximum)


def merge(tensors: tuple[TensorInfo, ...], added: tuple[TensorInfo, ...], slice_name: str) -> tuple[TensorInfo, ...]:
    """The tensors of two slices of a dataset, with bounds that cover both.

    Raises:
        DataError: they differ in names, dtypes or shapes.

    """
    if _forms(tensors) != _forms(added):
        fix = "prepare all slices in the same way: same tensors, same sequence length or image size, same dtype"
        problem = f"{slice_name}: tensors differ from the dataset's"
        raise DataError("DATA017", problem, _text(added), _text(tensors), fix)
    return tuple(map(_union, tensors, added))


def _forms(tensors: tuple[TensorInfo, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]


def _union(a: TensorInfo, b: TensorInfo) -> TensorInfo:
    if a.minimum is None or a.maximum is None or b.minimum is None or b.maximum is None:
        return a
    minimum = min(a.minimum, b.minimum)
    maximum = max(a.maximum, b.maximum)
    return replace(a, minimum=minimum, maximum=maximum)


def _check_bounds(tensors: tuple[TensorInfo, ...], manifest: Manifest, slice_name: str) -> None:
    """Refuse tensors of a slice that exceed the bounds of the manifest."""
    union = merge(manifest.tensors, tensors, slice_name)
    for tensor, merged_tensor, listed_tensor in zip(tensors, union, manifest.tensors, strict=True):
        if merged_tensor != listed_tensor:
            problem = f"{slice_name}: {tensor.name} is out of bounds"
            raise DataError("DATA020", problem, _bounds(tensor), _bounds(listed_tensor), _AGAIN)


def _bounds(tensor: TensorInfo) -> str:
    return f"{tensor.minimum} … {tensor.maximum}"


def _text(tensors: tuple[TensorInfo, ...]) -> str:
    """Names, dtypes and shapes of tensors."""
    texts = []
    for tensor in tensors:
        shape_text = ", ".join(["N", *map(str, tensor.shape)])
        texts.append(f"{tensor.name} {tensor.dtype} [{shape_text}]")
    return ", ".join(texts)
