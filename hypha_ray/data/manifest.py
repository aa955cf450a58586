"""Description of a prepared dataset: the file ``manifest.json`` beside its slices.

The manifest is written last, so a folder that has one is complete. Its bounds allow a job to refuse, before anything
starts, a model with too small a vocabulary or too few classes.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from hypha_ray.data.provenance import MadeBy, Origin
from hypha_ray.errors import DataError
from hypha_ray.types import SLICES_PER_DATASET, SLICES_PER_PART, SliceInfo
from hypha_ray.types import TokenRules as TokenRules  # noqa: PLC0414  Part of a manifest.

MANIFEST = "manifest.json"
FORMAT_VERSION: Final = 1
MOST_BYTES = 64 << 20
"""Most bytes of a manifest: some three hundred thousand slices."""
MOST_SAMPLES = 1 << 40
"""Most samples of a slice."""
MOST_SLICE_BYTES = 1 << 50
"""Most bytes of a slice's samples."""
MOST_DIMENSIONS = 32
MOST_PARTS = SLICES_PER_DATASET // SLICES_PER_PART
"""Most parts of a dataset, each with its own range of numbers of slices."""
SPLITS = ("train", "validation")
DTYPES = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64", "bool"}
)
"""Element types of a slice's tensors, by their numpy names."""

Modality: TypeAlias = Literal["language", "vision", "audio", "prompts", "preferences", "other"]

_PROMPTS = {"input_ids": ("int32", 1), "attention_mask": ("int32", 1), "reward_data": ("uint8", 1)}
"""Dtype and number of dimensions of a prompt's tensors, by name."""
_PREFERENCES = ("input_ids", "attention_mask", "labels")
"""Names of a preference's tensors, which have two sequences each."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[^/\\\0]+")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor that every slice contains.

    `shape` is the shape of one sample. `minimum` and `maximum` are taken over all slices; they are None for floats,
    which have to be finite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    minimum: int | None = None
    maximum: int | None = None

    @property
    def sample_bytes(self) -> int:
        """Size of one sample of this tensor."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PreprocessorInfo:
    """The tokenizer or image processor that made the slices; `folder` is its copy beside them, None without a copy."""

    name: str
    revision: str | None = None
    folder: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class ClassInfo:
    """The classes of a dataset: their names, by number, and whether a sample may have several at once."""

    names: tuple[str, ...]
    several: bool = False


class Manifest(BaseModel):
    """A prepared dataset. Indices of slices are unique over all splits."""

    model_config = ConfigDict(frozen=True, strict=True)

    format_version: Literal[1] = FORMAT_VERSION
    name: str
    modality: Modality
    slices: tuple[SliceInfo, ...]
    tensors: tuple[TensorInfo, ...]
    preprocessor: PreprocessorInfo | None = None
    tokens: TokenRules | None = None
    """Decisions about tokens; None if there are no tokens, or if an earlier release prepared the dataset."""
    classes: ClassInfo | None = None
    """Classes of the labels; None if labels aren't classes, or have no names."""
    part: tuple[int, int] | None = None
    """Number of the part, from 0, and of all parts; None if this is the whole dataset."""
    made_by: MadeBy | None = None
    """Command that prepared the dataset; None if an earlier release did, or none."""
    origin: Origin | None = None
    """Account of the sources of the slices; None if they weren't made from texts or prompts."""

    def of(self, split: str) -> tuple[SliceInfo, ...]:
        """Slices of a split."""
        return tuple(info for info in self.slices if info.split == split)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a sample of each tensor."""
        return {tensor.name: tensor.shape for tensor in self.tensors}

    def samples(self, split: str) -> int:
        """Number of samples of a split."""
        return sum(info.samples for info in self.of(split))

    @property
    def sample_bytes(self) -> int:
        """Size of one sample, over all tensors."""
        return sum(tensor.sample_bytes for tensor in self.tensors)

    @property
    def identity(self) -> str:
        """Fingerprint of a dataset's samples and of their positions, and of nothing else."""
        slices = [(info.index, info.sha256, info.samples, info.split) for info in self.slices]
        text = repr(sorted(slices))
        return hashlib.sha256(text.encode()).hexdigest()

    def require(self, vocab_size: int | None = None, classes: int | None = None) -> None:
        """Check that a model's vocabulary and classes cover the data; None means that the model has none.

        Raises:
            DataError: a token id or a label lies beyond them.

        """
        self._require_below("input_ids", vocab_size, "vocabulary")
        self._require_below("labels", classes, "number of classes")

    def refuse_prompts(self) -> None:
        """Refuse a dataset of prompts, and one of preferences, where samples have to have a loss of their own.

        Raises:
            DataError: it is one.

        """
        if self.modality == "prompts":
            problem = f"dataset {self.name!r} has prompts, which have no loss"
            allowed = "language, vision or other"
            fix = "name a dataset of texts or images"
            raise DataError("DATA035", problem, self.modality, allowed, fix)
        if self.modality == "preferences":
            problem = f"dataset {self.name!r} has preferences, which are trained on by the job dpo"
            fix = "train with jobs/dpo.py, which is hypha-ray dpo, or name another dataset"
            raise DataError("DATA035", problem, self.modality, "language, vision or other", fix)

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` atomically.

        Raises:
            OSError: the folder can't be written.

        """
        temporary = folder / f".{MANIFEST}.{os.getpid()}"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(self.model_dump_json(indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(folder / MANIFEST)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _require_below(self, name: str, limit: int | None, noun: str) -> None:
        for tensor in self.tensors:
            largest = tensor.maximum
            if tensor.name == name and limit is not None and largest is not None and largest >= limit:
                problem = f"the model's {noun} is too small for dataset {self.name!r}"
                got = f"{name} up to {largest}"
                advice = f"give the model at least {largest + 1}"
                fix = f"{advice}, or prepare the dataset with the model's own preprocessor"
                raise DataError("DATA023", problem, got, f"0 … {limit - 1}", fix)


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json`` without reading the slices.

    Raises:
        DataError: it is malformed, of another version, or lists files that don't exist.

    """
    path = folder / MANIFEST
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MOST_BYTES:
            raise _too_large(path, size_bytes)
        data = path.read_bytes()
    except OSError as error:
        raise _malformed(path, error.strerror or str(error)) from None
    manifest = parse_manifest(data, path)
    for info in manifest.slices:
        if not (folder / info.file).is_file():
            raise _malformed(path, f"slice {info.index} has the file {info.file}, which doesn't exist")
    return manifest


def parse_manifest(data: bytes, path: Path | str, datasets: int = 1) -> Manifest:
    """The manifest that a file contains; `path` names it in errors.

    Args:
        data: the file's content.
        path: place of the file.
        datasets: number of datasets that it is a mixture of, as `mixture.mixed` makes it.

    Raises:
        DataError: it is malformed, or of another version.

    """
    if len(data) > MOST_BYTES:
        raise _too_large(path, len(data))
    manifest = _parse(data, path)
    for problem in _problems(manifest, datasets):
        raise _malformed(path, problem)
    return manifest


def _parse(data: bytes, path: Path | str) -> Manifest:
    try:
        raw_manifest = pydantic_core.from_json(data)
    except ValueError as error:
        raise _malformed(path, f"not JSON: {error}") from None
    version = raw_manifest.get("format_version") if isinstance(raw_manifest, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        problem = f"{path} has a format version that this release doesn't know"
        fix = "update hypha_ray, or prepare the dataset with this release"
        raise DataError("DATA004", problem, str(version), str(FORMAT_VERSION), fix)
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first_error = error.errors()[0]
        key = ".".join(map(str, first_error["loc"])) or "the whole file"
        raise _malformed(path, f"{key}: {first_error['msg']}") from None


def _problems(manifest: Manifest, datasets: int) -> Iterator[str]:
    """Problems that pydantic doesn't find, such as a slice's file name that leads out of the folder."""
    if not manifest.slices:
        yield "no slices"
    indices = {info.index for info in manifest.slices}
    if len(indices) < len(manifest.slices):
        yield "two slices with the same index"
    if not manifest.name.isprintable():
        yield f"the name {manifest.name!r} has control characters"
    if manifest.part is not None:
        part_number, parts = manifest.part
        if not 0 <= part_number < parts <= MOST_PARTS:
            yield f"part {_short(part_number)} of {_short(parts)}; there are at most {MOST_PARTS}, counted from 0"
    if manifest.modality == "prompts":
        forms = {tensor.name: (tensor.dtype, len(tensor.shape)) for tensor in manifest.tensors}
        missing = [name for name, form in _PROMPTS.items() if forms.get(name) != form]
        if missing:
            yield f"prompts without {' or '.join(missing)}"
    if manifest.modality == "preferences":
        yield from _problems_of_preferences(manifest)
    for tensor in manifest.tensors:
        yield from _problems_of_tensor(tensor)
    for info in manifest.slices:
        yield from _problems_of_slice(info, manifest, datasets * SLICES_PER_DATASET)


def _problems_of_preferences(manifest: Manifest) -> Iterator[str]:
    shapes = manifest.shapes
    missing = [name for name in _PREFERENCES if name not in shapes]
    if missing:
        yield f"preferences without {' or '.join(missing)}"
    elif len({shapes[name] for name in _PREFERENCES}) > 1 or len(shapes["labels"]) != 2 or shapes["labels"][0] != 2:
        yield "preferences whose samples have other tensors than two sequences of the same length"


def _problems_of_tensor(tensor: TensorInfo) -> Iterator[str]:
    if tensor.dtype not in DTYPES:
        yield f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}"
    elif len(tensor.shape) > MOST_DIMENSIONS or min(tensor.shape, default=0) < 0:
        yield f"tensor {tensor.name!r} has the shape {str(list(tensor.shape))[:200]}"
    elif tensor.sample_bytes > MOST_SLICE_BYTES:
        yield f"a sample of tensor {tensor.name!r} has {_short(tensor.sample_bytes)} bytes"
    elif max(abs(tensor.minimum or 0), abs(tensor.maximum or 0)) >= 1 << 64:
        yield f"tensor {tensor.name!r} has numbers of more than 64 bits"


def _problems_of_slice(info: SliceInfo, manifest: Manifest, index_limit: int) -> Iterator[str]:
    slice_name = f"slice {_short(info.index)}"
    if info.file in {".", ".."} or not _FILE_NAME.fullmatch(info.file):
        yield f"{slice_name} has the file {info.file!r}, which isn't a plain name"
    elif info.index < 0 or info.samples < 1:
        yield f"{slice_name} has {_short(info.samples)} samples"
    elif info.index >= index_limit:
        yield f"a slice has the index {_short(info.index)}; indices are below {index_limit}"
    elif info.samples > MOST_SAMPLES or info.samples * manifest.sample_bytes > MOST_SLICE_BYTES:
        yield f"{slice_name} has {_short(info.samples)} samples, of {_short(manifest.sample_bytes)} bytes each"
    elif info.split not in SPLITS:
        yield f"{slice_name} is in split {info.split!r}, not in {' or '.join(SPLITS)}"
    elif not _SHA256.fullmatch(info.sha256):
        yield f"{slice_name} has no sha256"


def _short(number: int) -> str:
    """A number as text, of which only the beginning is shown if it is long."""
    text = str(number)
    if len(text) > 20:
        return f"{text[:20]}…"
    return text


def _too_large(path: Path | str, size_bytes: int) -> DataError:
    allowed = f"{MOST_BYTES:,} bytes"
    fix = "prepare the dataset with larger --samples-per-slice"
    return DataError("DATA003", f"{path} is too large", f"{size_bytes:,} bytes", allowed, fix)


def _malformed(path: Path | str, problem: str) -> DataError:
    fix = "copy the dataset again, or prepare it again with --overwrite"
    return DataError("DATA003", f"{path} can't be used", problem, fix=fix)
