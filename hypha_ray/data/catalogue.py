"""Lookup of datasets by path, or by name under the data roots; manifests of folders of bare slices."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hypha_ray.config.tables.training import Dataset
from hypha_ray.data.manifest import MANIFEST, Manifest, Modality, TensorInfo, read_manifest
from hypha_ray.data.provenance import readable
from hypha_ray.data.slices import describe, listed, merge, parse, read_file
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.store.directory import home
from hypha_ray.types import SliceInfo

UNFINISHED = ".unfinished"
"""Folder in a dataset's folder in which `prepare` works; if it exists without a manifest, slices are missing."""

_PREPARE = "make one with `python jobs/prepare.py --source … --out …`"


def roots() -> tuple[Path, ...]:
    """Folders in which datasets are looked up by name."""
    return (home() / "datasets",)


def locate(dataset: Dataset, places: Sequence[Path] | None = None) -> Path:
    """The folder of the dataset in a job file's ``[dataset]`` table.

    Args:
        dataset: has a path or a name.
        places: folders in which a name is looked up; default: `roots()`.

    Raises:
        ConfigError: it has neither or both.
        DataError: there is no such dataset.

    """
    if (dataset.path is None) == (dataset.name is None):
        found, fix = ("neither", "set dataset.path") if dataset.path is None else ("both", "leave one of them out")
        raise ConfigError("DATA007", "[dataset] needs either a path or a name", found, fix=fix)
    if dataset.path is not None:
        return _existing(Path(dataset.path).expanduser()).absolute()
    return find(str(dataset.name), places)


def local_names() -> set[str]:
    """Names of the datasets in the data roots of this machine."""
    return {name for place in roots() for name in _datasets(place)}


def is_served(dataset: Dataset) -> bool:
    """Whether data nodes of a cluster have to be asked: the dataset, or a part, has a name that no folder has."""
    names = [part.name for part in dataset.parts if part.path is None and part.name is not None]
    return bool(os.environ.get("RAY_ADDRESS")) and not set(names) <= local_names()


def meant_by(text: str) -> Dataset:
    """The dataset that a command line means: a folder if there is one, or else a name if there may be one of it."""
    named = Dataset(name=text)
    is_name = "/" not in text and not Path(text).exists()
    return named if is_name and (text in local_names() or is_served(named)) else Dataset(path=text)


def folders_of(dataset: Dataset) -> list[Path]:
    """Return the folders of a dataset, or of all parts of a mixture, as far as they are to be on this machine.

    Raises:
        DataError: there is none at a path or of a name.

    """
    if is_served(dataset):
        return []
    return [locate(part) for part in dataset.parts if part.path is None or "://" not in part.path]


def find(name: str, places: Sequence[Path] | None = None) -> Path:
    """The folder of the dataset of that name.

    Raises:
        DataError: no folder has it; the nearest name is suggested.

    """
    places = roots() if places is None else places
    for place in places:
        if name in _datasets(place):
            return place / name
    known = {other for place in places for other in _datasets(place)}
    where = ", ".join(map(str, places))
    raise DataError("DATA001", f"there is no dataset {name!r} in {where}", fix=_suggestion(name, known))


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
    files = [file for file in folder.glob("*.safetensors") if file.is_file()]
    if not files:
        raise DataError("DATA002", f"{folder} contains no slices", "no manifest.json, no *.safetensors", fix=_PREPARE)
    return index(folder, files)


def _existing(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    if folder.exists():
        raise DataError("DATA001", f"{folder} is a file", fix="name the folder that the slices are in")
    known = _datasets(folder.parent)
    raise DataError("DATA001", f"there is no dataset at {folder}", fix=_suggestion(folder.name, known))


def _datasets(place: Path) -> list[str]:
    if not place.is_dir():
        return []
    return [child.name for child in place.iterdir() if child.is_dir() and _is_dataset(child)]


def _is_dataset(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() or any(folder.glob("*.safetensors"))


def _suggestion(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose one of {', '.join(names[:8])}, or {_PREPARE}" if names else _PREPARE


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
