"""Files of a prepared dataset and of its preprocessor, in a folder of this machine, or at a URL with a cache on disk.

The cache has files by content, and is shared by all datasets and jobs of the machine:

    <folder>/<first two characters of the sha256>/<sha256>

There is no lock. A file appears by renaming, two writers write the same bytes, and a file that another process has
removed is fetched again. Only files with such names are ever removed.

Each process keeps accounts of the files. It lists a subfolder again only if its time of change is a new one: then some
process has added or removed files.
"""

from __future__ import annotations

import heapq
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hypha_ray.data.catalogue import LargeError, MissingError, UrlFolder, is_url, load
from hypha_ray.data.manifest import MANIFEST, MOST_BYTES, Manifest, parse_manifest
from hypha_ray.data.slices import Arrays, SliceChecker, container, decode_slice, read_slice_file
from hypha_ray.errors import AuthenticationError, DataError
from hypha_ray.files import make_private, opener
from hypha_ray.store.directory import home
from hypha_ray.texts import redacted
from hypha_ray.types import SliceInfo

_USUAL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
)
"""Names of a preprocessor's files, which are tried at URLs whose files can't be listed."""
LARGEST_BYTES = 100_000_000
"""Largest size of a file that counts as one of a preprocessor; tokenizers have tens of megabytes at most."""
MOST_FILES = 1000
"""Most files of a preprocessor that are read."""
HEADER_BYTES = 16 << 20
"""Most bytes of a slice's file beside its samples."""
SHARE = 5
MOST_CACHED_BYTES = 50_000_000_000
"""Default limit: a fifth of the free disk, and 50 GB at most."""
_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.part)?")
_SUBFOLDER = re.compile(r"[0-9a-f]{2}")
SECOND_NS = 1_000_000_000
SETTLED_S = 0.1
SETTLED_SECONDS_S = 2.0
"""Age in seconds from which any later change of a folder has another time of change.

File systems round times; the second age is for those that round to whole seconds.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a job's dataset: a folder or a URL, or the name by which data nodes serve it."""

    address: str
    served: bool = False


class DatasetFiles(Protocol):
    """Reads a prepared dataset."""

    def manifest(self, fresh: bool = False) -> Manifest:
        """Manifest of the dataset.

        That of a folder is as it is now, even after the folder was prepared anew.

        Args:
            fresh: fetch that of a URL again.

        Raises:
            HyphaError: there is none, it is damaged, or can't be reached.

        """

    def read(self, info: SliceInfo, fresh: bool = False) -> Arrays:
        """A slice's tensors, checked against the manifest; if `fresh`, never from a cache, and by their sha256.

        Raises:
            HyphaError: the slice is missing or damaged, or can't be reached.

        """

    def preprocessor(self) -> dict[str, bytes]:
        """Files of the tokenizer or image processor, by path in the dataset's folder; none if there is no such thing.

        Raises:
            HyphaError: they can't be reached.

        """


def files_at(address: str, cache_gb: float | None = None, note: Callable[[str], None] | None = None) -> DatasetFiles:
    """The dataset in a folder of this machine, or at a URL.

    Args:
        address: folder or URL.
        cache_gb: most gigabytes of files at URLs that are kept on this machine's disk; None: a share of the disk.
        note: takes a line of text for the user.

    """
    if not is_url(address):
        return FolderFiles(Path(address).expanduser())
    limit_bytes = None if cache_gb is None else int(cache_gb * 1e9)
    return UrlFiles(address, DiskCache(home() / "cache", limit_bytes), note)


class FolderFiles:
    """Dataset in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checker = SliceChecker(trusts_manifest=True)
        self._manifest: Manifest | None = None
        self._version: tuple[int, ...] | None = None
        """Version of the manifest's file as it was loaded; None before."""

    def manifest(self, fresh: bool = False) -> Manifest:
        """See `DatasetFiles`."""
        version = self._version_now()
        if self._manifest is None or (version is not None and version != self._version):
            self._manifest = load(self._folder)
            self._version = self._version_now() if version is None else version
        return self._manifest

    def _version_now(self) -> tuple[int, ...] | None:
        """Numbers that change as the manifest is written anew; None if there is none, such as while it is written."""
        try:
            state = (self._folder / MANIFEST).stat()
        except OSError:
            return None
        return state.st_ino, state.st_mtime_ns, state.st_size

    def read(self, info: SliceInfo, fresh: bool = False) -> Arrays:
        """See `DatasetFiles`."""
        decode = decode_slice if fresh else self._checker.decode
        return decode(read_slice_file(self._folder, info), info, self.manifest())

    def preprocessor(self) -> dict[str, bytes]:
        """See `DatasetFiles`."""
        return preprocessor_files(self._folder)


class UrlFiles:
    """Dataset at a URL that fsspec reads; slices are kept in a cache on this machine's disk.

    Args:
        url: folder of the dataset.
        cache: keeps slices.
        note: takes a line of text for the user, once.

    """

    def __init__(self, url: str, cache: DiskCache, note: Callable[[str], None] | None = None) -> None:
        self._folder = UrlFolder(url)
        self._cache = cache
        self._note = note
        self._noted = False
        self._checker = SliceChecker(trusts_manifest=False)
        self._manifest: Manifest | None = None

    def manifest(self, fresh: bool = False) -> Manifest:
        """See `DatasetFiles`."""
        if self._manifest is None or fresh:
            address = redacted(self._folder.url)
            try:
                data = self._folder.read(MANIFEST, MOST_BYTES)
            except LargeError as error:
                raise DataError("DATA003", error.what, error.got, error.allowed, error.fix) from None
            except DataError as error:
                problem = f"the manifest of {address} can't be read"
                if isinstance(error, MissingError):
                    problem = f"there is no dataset at {address}"
                fix = "check the URL; it names the folder that has manifest.json"
                raise DataError("DATA001", problem, error.got, fix=fix) from None
            self._manifest = parse_manifest(data, f"{address}/{MANIFEST}")
        return self._manifest

    def read(self, info: SliceInfo, fresh: bool = False) -> Arrays:
        """See `DatasetFiles`."""
        manifest = self.manifest()
        if fresh:
            return decode_slice(self._fetch(info, manifest), info, manifest)
        copy = self._cache.read(info.sha256)
        if copy is not None:
            try:
                return self._checker.decode(copy, info, manifest)
            except DataError:  # The copy is damaged; the original may be intact.
                self._cache.remove(info.sha256)
        data = self._fetch(info, manifest)
        arrays = self._checker.decode(data, info, manifest)
        problem = self._cache.write(info.sha256, data)
        if problem is not None and self._note is not None and not self._noted:
            self._noted = True
            self._note(f"slices of {redacted(self._folder.url)} are fetched anew for each use: {problem}")
        return arrays

    def _fetch(self, info: SliceInfo, manifest: Manifest) -> bytes:
        """Content of a slice's file at the URL."""
        slice_name = f"slice {info.index} ({info.file})"
        limit_bytes = info.samples * manifest.sample_bytes + HEADER_BYTES
        try:
            content = self._folder.read(info.file, limit_bytes)
        except LargeError as error:
            fix = "copy the dataset again, or prepare it again with --overwrite"
            raise DataError("DATA012", f"{slice_name}: the file is too large", error.got, error.allowed, fix) from None
        return container(content, slice_name)

    def preprocessor(self) -> dict[str, bytes]:
        """See `DatasetFiles`."""
        made_by = self.manifest().preprocessor
        if made_by is None or made_by.folder is None:
            return {}
        names = self._small_files(made_by.folder)
        if not names:
            names = [f"{made_by.folder}/{name}" for name in _USUAL_FILES]
        files = {}
        for name in names:
            # S3 refuses access to missing files if they mustn't be listed.
            with suppress(DataError, AuthenticationError):
                files[name] = self._folder.read(name, LARGEST_BYTES)
        return files

    def _small_files(self, folder: str) -> list[str]:
        """Files of a folder that may be a preprocessor's; none if they can't be listed."""
        sizes = self._folder.sizes(folder)
        names = [name for name, size_bytes in sizes.items() if size_bytes is None or size_bytes <= LARGEST_BYTES]
        return names[:MOST_FILES]


def preprocessor_files(folder: Path) -> dict[str, bytes]:
    """Files of a dataset's folder and its subfolders that are neither slices nor hidden, by path in the folder."""
    files = {}
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if _belongs(path, folder):
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write files to a folder; a name that leads out of it is passed over.

    Raises:
        OSError: the folder can't be written.

    """
    for name, content in files.items():
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _belongs(path: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    if is_hidden or not path.is_file() or path.suffix == ".safetensors":
        return False
    return path.stat().st_size <= LARGEST_BYTES


@dataclass(frozen=True, slots=True)
class _Account:
    """Account of a subfolder.

    Attributes:
        changed_ns: time of the subfolder's last change, by the clock of the file system.
        seen_s: monotonic time at which this process has first found that time of change.
        settled: whether a change since the listing would have another time.
        files: time of the last use, path and size of each file.
        bytes: size of all files together.

    """

    changed_ns: int
    seen_s: float
    settled: bool
    files: list[tuple[int, str, int]]
    bytes: int


class DiskCache:
    """Keeps the files used last, within a limit.

    Args:
        folder: folder of the cache, which may not exist yet.
        limit_bytes: most bytes of all files together; None: a share of the free disk.

    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self._folder = folder
        self._fixed_limit_bytes = limit_bytes
        self._accounts: dict[str, _Account] = {}
        """Account of each subfolder by its name."""

    @property
    def limit_bytes(self) -> int:
        """Most bytes of all files together."""
        if self._fixed_limit_bytes is not None:
            return self._fixed_limit_bytes
        existing = self._folder
        while not existing.exists():
            existing = existing.parent
        cached_bytes = sum(account.bytes for account in self._current())
        free_bytes = shutil.disk_usage(existing).free
        return min(MOST_CACHED_BYTES, (free_bytes + cached_bytes) // SHARE)

    def read(self, sha256: str) -> bytes | None:
        """Content of a file, which isn't checked; None if the cache lacks it."""
        path = self._path(sha256)
        with suppress(OSError):
            data = path.read_bytes()
            os.utime(path)  # So this file counts as used last.
            return data
        return None

    def write(self, sha256: str, data: bytes) -> str | None:
        """Keep a file, and remove those that were used longest ago if there are too many bytes.

        Returns:
            None, or the reason why it isn't kept, such as a file larger than the limit or a full disk.

        """
        path = self._path(sha256)
        part = path.with_name(f"{sha256}.{uuid.uuid4().hex}.part")
        try:
            limit_bytes = self.limit_bytes
            if len(data) > limit_bytes:
                return f"a file of {len(data):,} bytes is larger than the cache's limit of {limit_bytes:,}"
            make_folder(self._folder)
            make_folder(path.parent)
            self._shrink(limit_bytes - len(data))
            with open(part, "wb", opener=opener) as file:
                file.write(data)
            part.replace(path)
            self._shrink(
                limit_bytes
            )  # Other processes may have written meanwhile, and the last one to look sees all files.
        except FileNotFoundError:
            return None  # Another process has just removed it, to make room for its own files.
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            return f"{self._folder} can't be written: {error.strerror or error}"
        return None

    def remove(self, sha256: str) -> None:
        """Remove a file that is damaged."""
        with suppress(OSError):
            self._path(sha256).unlink()

    def _shrink(self, limit_bytes: int) -> None:
        """Remove files, those used longest ago first, until the others have at most `limit_bytes`."""
        accounts = self._current()
        total = sum(account.bytes for account in accounts)
        if total <= limit_bytes:
            return
        files = list[tuple[int, str, int]]()
        for account in accounts:
            files.extend(account.files)
        heapq.heapify(files)
        while files and total > limit_bytes:
            listed_ns, path, size_bytes = heapq.heappop(files)
            with suppress(FileNotFoundError):
                used_ns = os.lstat(path).st_mtime_ns
                if used_ns > listed_ns:  # The file was used since the subfolder was listed.
                    heapq.heappush(files, (used_ns, path, size_bytes))
                    continue
                Path(path).unlink()
            total -= size_bytes

    def _current(self) -> list[_Account]:
        """Accounts of all subfolders as they are now."""
        previous = self._accounts
        self._accounts = {}
        for name, changed_ns in _subfolders(self._folder):
            account = previous.get(name)
            if account is None or account.changed_ns != changed_ns:
                account = _listed(self._folder / name, changed_ns, time.monotonic())
            elif not account.settled:
                account = _listed(self._folder / name, changed_ns, account.seen_s)
            self._accounts[name] = account
        return list(self._accounts.values())

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


def _subfolders(folder: Path) -> Iterable[tuple[str, int]]:
    """Name and time of change of each subfolder that may have files; none if the folder isn't there."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _SUBFOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_mtime_ns


def _listed(folder: Path, changed_ns: int, seen_s: float) -> _Account:
    """Account of a subfolder that is listed now; files that a killed process left half written belong to it."""
    age_s = time.monotonic() - seen_s
    files = list[tuple[int, str, int]]()
    total_bytes = 0
    is_settled = age_s > (SETTLED_S if changed_ns % SECOND_NS else SETTLED_SECONDS_S)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                belongs = _NAME.fullmatch(entry.name) and entry.name[:2] == folder.name
                if belongs and stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime_ns, entry.path, status.st_size))
                    total_bytes += status.st_size
                    is_settled &= not entry.name.endswith(".part")  # A partial file may grow.
    return _Account(changed_ns, seen_s, is_settled, files, total_bytes)


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        make_private(folder)
