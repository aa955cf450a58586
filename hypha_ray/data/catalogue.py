"""Lookup of datasets by path, or by name under the data roots; manifests of folders of bare slices."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hypha_ray.config.training import Dataset
from hypha_ray.data.manifest import MANIFEST, Manifest, Modality, TensorInfo, read_manifest
from hypha_ray.data.provenance import readable
from hypha_ray.data.slices import describe, listed, merge, parse, read_file
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.store.directory import home
from hypha_ray.types import SliceInfo

UNFINISHED = ".unfinished"
"""Folder in a dataset's folder in which `prepare` works; if it exists without a manifest, slices are missing."""

_PREPARE = "make one with `python jobs/prepare.py --source … --out …`"
_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test)([^a-z]|$)")


def roots() -> tuple[Path, ...]:
    """Folders in which datasets are looked up by name."""
    return (home() / "datasets",)


def locate(dataset: Dataset, folders: Sequence[Path] | None = None) -> Path:
    """The folder of the dataset in a job file's ``[dataset]`` table.

    Args:
        dataset: has a path or a name.
        folders: folders in which a name is looked up; default: `roots()`.

    Raises:
        ConfigError: it has neither or both.
        DataError: there is no such dataset.

    """
    if (dataset.path is None) == (dataset.name is None):
        problem = "[dataset] needs either a path or a name"
        if dataset.path is None:
            raise ConfigError("DATA007", problem, "neither", fix="set dataset.path")
        raise ConfigError("DATA007", problem, "both", fix="leave one of them out")
    if dataset.path is not None:
        return _existing(Path(dataset.path).expanduser()).absolute()
    return find(str(dataset.name), folders)


def local_names() -> set[str]:
    """Names of the datasets in the data roots of this machine."""
    return _names_in(roots())


def is_served(dataset: Dataset) -> bool:
    """Whether data nodes of a cluster have to be asked: the dataset, or a part, has a name that no folder has."""
    names = {part.name for part in dataset.parts if part.path is None and part.name is not None}
    return bool(os.environ.get("RAY_ADDRESS")) and not names <= local_names()


def resolve_dataset(text: str) -> Dataset:
    """Resolve a dataset argument of a command: a folder if it exists, otherwise a name that may be served."""
    if "/" in text or Path(text).exists():
        return Dataset(path=text)
    by_name = Dataset(name=text)
    if text in local_names() or is_served(by_name):
        return by_name
    return Dataset(path=text)


def folders_of(dataset: Dataset) -> list[Path]:
    """Return the folders of a dataset, or of all parts of a mixture, without those at URLs or on data nodes.

    Raises:
        DataError: there is none at a path or of a name.

    """
    if is_served(dataset):
        return []
    folders = []
    for part in dataset.parts:
        if part.path is None or "://" not in part.path:
            folders.append(locate(part))
    return folders


def find(name: str, folders: Sequence[Path] | None = None) -> Path:
    """The folder of the dataset of that name.

    Raises:
        DataError: no folder has it; the nearest name is suggested.

    """
    folders = roots() if folders is None else folders
    for folder in folders:
        if name in _datasets(folder):
            return folder / name
    listed = ", ".join(map(str, folders))
    fix = _suggestion(name, _names_in(folders))
    raise DataError("DATA001", f"there is no dataset {name!r} in {listed}", fix=fix)


def load(folder: Path | str) -> Manifest:
    """The manifest of a prepared folder; a folder of bare ``*.safetensors`` files is indexed on first use.

    Raises:
        DataError: the folder is missing, holds no dataset, or a damaged one.

    """
    folder = _existing(Path(folder).expanduser())
    if (folder / MANIFEST).is_file():
        return read_manifest(folder)
    if (folder / UNFINISHED).exists():
        fix = "run the same `python jobs/prepare.py` again: it replaces the unfinished files"
        raise DataError("DATA006", f"the preparation of {folder} didn't finish", fix=fix)
    files = list(filter(Path.is_file, folder.glob("*.safetensors")))
    if not files:
        raise DataError("DATA002", f"{folder} contains no slices", "no manifest.json, no *.safetensors", fix=_PREPARE)
    return index(folder, files)


def _existing(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError("DATA001", f"{folder} is a file", fix="name the folder that the slices are in")
    fix = _suggestion(folder.name, _datasets(folder.parent))
    raise DataError("DATA001", f"there is no dataset at {folder}", fix=fix)


def _names_in(folders: Iterable[Path]) -> set[str]:
    names = set[str]()
    for folder in folders:
        names.update(_datasets(folder))
    return names


def _datasets(folder: Path) -> list[str]:
    """Names of the datasets in a folder."""
    if not folder.is_dir():
        return []
    names = []
    for child in folder.iterdir():
        if child.is_dir() and _is_dataset(child):
            names.append(child.name)
    return names


def _is_dataset(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(folder.glob("*.safetensors"))


def _suggestion(name: str, datasets: Iterable[str]) -> str:
    names = sorted(datasets)
    for similar in difflib.get_close_matches(name, names, n=1, cutoff=0.5):
        return f"did you mean {similar!r}?"
    if not names:
        return _PREPARE
    return f"choose one of {', '.join(names[:8])}, or {_PREPARE}"


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
        slice_name = f"slice {number} ({file.name})"
        data = read_file(file, slice_name)
        samples, described = describe(parse(data, slice_name), slice_name)
        tensors = merge(tensors or described, described, slice_name)
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
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        shape = shapes["input_ids"]
        if len(shape) == 2 and shape[0] == 2 and shapes.get("labels") == shapes.get("attention_mask") == shape:
            return "preferences"
        return "prompts" if "reward_data" in names else "language"
    return "other"
