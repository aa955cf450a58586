"""Places of datasets: their lookup by path, or by name under the data roots; and folders at URLs that fsspec knows.

A folder of bare slices is given a manifest. Errors of file systems have a remedy for each cause.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsspec.callbacks import Callback

from hypha_ray.config.training import Dataset
from hypha_ray.data.manifest import MANIFEST, Manifest, Modality, TensorInfo, read_manifest
from hypha_ray.data.provenance import readable
from hypha_ray.data.slices import UNREADABLE, describe, listed, merge, parse, read_file
from hypha_ray.errors import AuthenticationError, ConfigError, DataError, HubError, HyphaError, TryAgainError, line_of
from hypha_ray.remote_errors import (
    Cause,
    cause_of,
    chain,
    error_of_cause,
    error_of_refusal,
    is_unknown_host,
    may_pass,
    refusal_of_url,
    retry_after_s,
    status_of,
)
from hypha_ray.remote_files import TooLargeError, is_http, is_s3, open_url
from hypha_ray.store.directory import home
from hypha_ray.texts import redacted
from hypha_ray.types import SliceInfo

UNFINISHED = ".unfinished"
"""Folder in a dataset's folder in which `prepare` works; if it exists without a manifest, slices are missing."""

_PREPARE = "make one with `python jobs/prepare.py --source … --out …`"
_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test)([^a-z]|$)")
T = TypeVar("T")
WAITS_S = (0.5, 2.0, 8.0)
"""Seconds between tries of a request that may succeed later; longer if the server asks for that."""
LONGEST_WAIT_S = 60.0
"""Longest time in seconds for which a server may ask before the next try."""
_CREATED_BY_ANOTHER = (409, 412)
"""Statuses of HTTP after a conditional write of a file that is there."""


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
    listed_folders = ", ".join(map(str, folders))
    fix = _suggestion(name, _names_in(folders))
    raise DataError("DATA001", f"there is no dataset {name!r} in {listed_folders}", fix=fix)


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
    seen_from = "" if folder.is_absolute() else f" in {Path.cwd()}"
    raise DataError("DATA001", f"there is no dataset at {folder}{seen_from}", fix=fix)


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
    is_model = (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()
    return (folder / MANIFEST).is_file() or (not is_model and any(folder.glob("*.safetensors")))


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


class LargeError(DataError):
    """A file is larger than allowed."""


class MissingError(DataError):
    """There is nothing at a URL."""


def is_url(address: str) -> bool:
    """Whether the address of a dataset is a URL, and no folder."""
    return "://" in address


def name_of(address: str) -> str:
    """Name of a folder; that of a URL is without its query, which may be secret."""
    path = address
    if is_url(address):
        path, _, _ = address.partition("?")
    _, _, name = path.rstrip("/").rpartition("/")
    return name


class UrlFolder:
    """Reads and writes files below a URL. Requests are tried again if that may help; all raise a `HyphaError`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[Any, str] | None = None
        self._anew = False
        """Whether the file system is to be opened with credentials as they are then."""

    def read(self, name: str, limit_bytes: int | None = None) -> bytes:
        """Content of a file.

        Args:
            name: name of the file.
            limit_bytes: largest size; None: any.

        Raises:
            LargeError: it is larger.
            HyphaError: it can't be read.

        """

        def read(fs: Any, path: str) -> bytes:
            content: bytes
            if limit_bytes is not None and is_http(fs):  # Not every server sends a size, or supports ranges.
                content = fs.cat_file(path, limit_bytes=limit_bytes)
                return content
            if limit_bytes is not None:
                size_bytes = fs.size(path) or 0
                if size_bytes > limit_bytes:
                    raise TooLargeError(f"{size_bytes:,} bytes")
            content = fs.cat_file(path)
            return content

        try:
            return self._request(name, read)
        except TooLargeError as error:
            problem = f"{redacted(f'{self.url}/{name}')} is too large"
            fix = "check the URL, or prepare the dataset again"
            raise LargeError(UNREADABLE, problem, str(error), f"{limit_bytes:,} bytes", fix) from None

    def get(self, name: str, file: Path, progress: Callback) -> None:
        """Copy a file of it to this machine."""
        self._request(name, lambda fs, path: fs.get_file(path, str(file), callback=progress))

    def put(self, file: Path, name: str) -> None:
        """Copy a file of this machine there."""

        def put(fs: Any, path: str) -> None:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(file), path)

        self._request(name, put)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it is there; whether it was written.

        If two processes try at once, only one writes it, provided that the store has conditional writes, as S3 and GCS
        do.
        """

        def create(fs: Any, path: str) -> bool:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.invalidate_cache()
            if fs.exists(path):
                return False
            try:
                fs.pipe_file(path, content, mode="create")
            except FileExistsError:
                return False
            except Exception as error:
                if status_of(list(chain(error))) not in _CREATED_BY_ANOTHER:
                    raise
                return False
            return True

        return self._request(name, create)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._request(name, lambda fs, path: fs.rm_file(path))
        except DataError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self._request(name, lambda fs, path: fs.exists(path)))

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Size of each file of a folder, by path below the URL; None: unknown. Empty if they can't be listed."""
        try:
            fs, root = self._open()
            fs.invalidate_cache()
            rows = fs.find(f"{root}/{folder}".rstrip("/"), detail=True)
        except Exception:  # Not every file system can list its files.
            return {}
        sizes: dict[str, int | None] = {}
        for path, row in rows.items():
            if path.startswith(root):
                name = path.removeprefix(root).lstrip("/")
                sizes[name] = row.get("size")
        return sizes

    def _open(self) -> tuple[Any, str]:
        """File system, and the folder in it."""
        if self._opened is None:
            fs, root = open_url(self.url, self._anew)
            self._opened = (fs, root.rstrip("/"))
            self._anew = False
        return self._opened

    def _request(self, name: str, request: Callable[[Any, str], T]) -> T:
        """Result of a request for a file, which is tried again if that may help."""
        for wait_s in (*WAITS_S, None):
            try:
                fs, root = self._open()
                return request(fs, self._path(root, name))
            except TooLargeError:
                raise
            except Exception as error:  # Each kind of file system has errors of its own.
                problem = explain(error, self.url, name, self._cause(error, name))
                if isinstance(problem, AuthenticationError):
                    # There may be new credentials next time.
                    self._opened = None
                    self._anew = True
                if wait_s is None or not isinstance(problem, TryAgainError):
                    raise problem from None
                time.sleep(max(wait_s, retry_after_s(error, LONGEST_WAIT_S)))
        raise AssertionError("unreachable")

    def _path(self, root: str, name: str) -> str:
        """Path of a file in the file system; a query of the URL stays at the end."""
        if "?" not in self.url:
            return f"{root.rstrip('/')}/{name}"
        folder, mark, query = root.partition("?")
        return f"{folder.rstrip('/')}/{name}{mark}{query}"

    def _cause(self, error: Exception, name: str) -> Cause | None:
        """Cause that an object store reports; None without one, and for other file systems."""
        if self._opened is None or not is_s3(self._opened[0]):
            return None
        fs, root = self._opened
        return cause_of(error, fs, f"{root}/{name}")


def explain(error: Exception, url: str, name: str, cause: Cause | None = None) -> HyphaError:
    """The error to raise in place of an error of a file system, by that error and its causes.

    Args:
        error: error that the file system raised.
        url: folder of the dataset.
        name: name of the file in it.
        cause: cause that an object store has reported.

    """
    address = redacted(f"{url}/{name}")
    got = line_of(error, url)
    if cause is not None:
        return error_of_cause(cause, address, got)
    refusal = refusal_of_url(error, url)
    if refusal is not None:
        return refusal
    return _of_answer(list(chain(error)), address, got)


def _of_answer(links: list[BaseException], address: str, got: str) -> HyphaError:
    """Error of a server that has answered, or that can't be reached."""
    refusal = error_of_refusal(links, address, got)
    if refusal is not None:
        return refusal
    status = status_of(links)
    if isinstance(links[0], FileNotFoundError) or status in (404, 410):
        return MissingError(UNREADABLE, f"there is nothing at {address}", got, fix="check the URL")
    if any(map(is_unknown_host, links)):
        return MissingError(
            UNREADABLE, f"the host of {address} doesn't exist", got, fix="check the URL and the network"
        )
    if may_pass(links, status):
        fix = "give the same command again later; a run goes on from its last commit"
        return HubError("DATA065", f"{address} can't be reached now", got, fix=fix)
    return DataError(UNREADABLE, f"{address} can't be read", got, fix="check the URL, and the settings for its kind")
