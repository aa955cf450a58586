"""Files of a prepared dataset and of its preprocessor, in a folder of this machine or at a URL."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hypha_ray.data.catalogue import load
from hypha_ray.data.disk_cache import DiskCache
from hypha_ray.data.manifest import MANIFEST, MOST_BYTES, Manifest, parse_manifest
from hypha_ray.data.slices import Arrays, SliceChecker, container, decode_slice, read_slice_file
from hypha_ray.data.url_folder import LargeError, MissingError, UrlFolder, is_url
from hypha_ray.errors import AuthenticationError, DataError
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
        """Marks by which another file of the manifest is told apart; None without one, such as while it is written."""
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
        names = [name for name, size in sizes.items() if size is None or size <= LARGEST_BYTES]
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


def same_tokens(first: Path, second: Path) -> bool:
    """Whether no id stands for different tokens in two saved tokenizers.

    Special tokens, which models of one family rename, don't count. Without `tokenizer.json` tokens aren't known, and
    nothing differs.
    """
    first_tokens = _tokens_by_id(first)
    second_tokens = _tokens_by_id(second)
    common_ids = first_tokens.keys() & second_tokens.keys()
    return all(first_tokens[token_id] == second_tokens[token_id] for token_id in common_ids)


def _tokens_by_id(folder: Path) -> dict[int, str]:
    """Tokens of a saved tokenizer by id, without special ones; empty if they aren't known."""
    try:
        file = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = file["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {token_id: token for token, token_id in vocabulary.items()}
        else:
            tokens = {token_id: token for token_id, (token, _) in enumerate(vocabulary)}
        for token in file["added_tokens"]:
            tokens.pop(token["id"], None)
        return tokens
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _belongs(path: Path, folder: Path) -> bool:
    is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    if is_hidden or not path.is_file() or path.suffix == ".safetensors":
        return False
    return path.stat().st_size <= LARGEST_BYTES
