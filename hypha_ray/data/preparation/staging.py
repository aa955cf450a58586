"""Output of a preparation: a folder whose files are moved into place at the end, or uploads to a URL."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.data.catalogue import UNFINISHED
from hypha_ray.data.manifest import MANIFEST
from hypha_ray.data.preparation.encoders import FOLDER, PREPROCESSOR
from hypha_ray.data.storage.url_folder import UrlFolder
from hypha_ray.errors import ConfigError, DataError, TryAgainError
from hypha_ray.texts import redacted


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder for slices, tokenizer and manifest, which are moved to `out` at the end.

    Files of an unfinished preparation are replaced. Other files in `out` stay.

    Raises:
        ConfigError: `out` already has a dataset and `overwrite` isn't set, or is a file.
        DataError: `out` can't be written.
        TryAgainError: another process prepares a dataset there.

    """
    if out.exists() and not out.is_dir():
        raise ConfigError("PREP003", f"--out {out} is a file", fix="name a folder")
    work = out / UNFINISHED
    created = not out.exists()
    with _explained(out), _locked(out):
        _require_empty(out, overwrite)
        try:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
            yield work
        except BaseException:
            shutil.rmtree(out if created else work, ignore_errors=True)
            raise
        # From here on, the inner folder marks a folder without a manifest as unfinished.
        _clear(out)
        for path in sorted(work.iterdir(), key=lambda path: path.name == MANIFEST):
            path.replace(out / path.name)
        work.rmdir()


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        fix = "free some space, or choose another --out"
        raise DataError("DATA009", f"{error.filename or out} can't be written", reason, fix=fix) from error


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """The folder, made if need be, with a lock against other preparations, which ends with the process.

    Raises:
        TryAgainError: PREP016, another process has the lock.

    """
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # Some network file systems have no locks of folders.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "wait until it has ended, or choose another --out"
                raise TryAgainError("PREP016", f"another process prepares a dataset in {out}", fix=fix) from None
        yield
    finally:
        os.close(descriptor)


def _require_empty(out: Path, overwrite: bool) -> None:
    unfinished = (out / UNFINISHED).exists() and not (out / MANIFEST).exists()
    if not overwrite and not unfinished and _belongings(out):
        fix = "add --overwrite, or choose another --out"
        raise ConfigError("PREP004", f"{out} already contains a dataset", fix=fix)


def _clear(out: Path) -> None:
    """Remove the old dataset, manifest first: without a manifest it doesn't count as complete."""
    for path in _belongings(out):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _belongings(out: Path) -> list[Path]:
    """Files of a dataset, the manifest first."""
    slices = sorted(out.glob("*.safetensors"))
    return list(filter(Path.exists, (out / MANIFEST, out / FOLDER, out / PREPROCESSOR, *slices)))


@dataclass(frozen=True, slots=True)
class Upload:
    """A folder of this machine, and the folder at a URL that its files go to."""

    folder: Path
    destination: UrlFolder

    def slice(self, file: Path) -> None:
        """Move a slice to the URL."""
        self.destination.put(file, file.name)
        file.unlink()


@contextmanager
def uploaded(url: str, overwrite: bool) -> Iterator[Upload]:
    """A new folder of this machine for tokenizer and manifest, which are copied to the URL at the end, manifest last.

    Raises:
        ConfigError: the URL already has a dataset and `overwrite` isn't set, or can't be written.
        HyphaError: the URL can't be reached.

    """
    destination = UrlFolder(url)
    if url.startswith(("http:", "https:")):
        raise ConfigError("CFG003", "--out can't be written by HTTP", redacted(url), "s3, gs, hf or file, or a folder")
    if destination.exists(MANIFEST):
        if not overwrite:
            fix = "add --overwrite, or choose another --out"
            raise ConfigError("PREP004", f"{redacted(url)} already contains a dataset", fix=fix)
        destination.remove(MANIFEST)  # First: without a manifest it doesn't count as complete.
    for name in destination.sizes(""):
        is_slice = "/" not in name and name.endswith(".safetensors")
        if is_slice or name.startswith((f"{FOLDER}/", f"{PREPROCESSOR}/")):
            destination.remove(name)
    with tempfile.TemporaryDirectory() as folder:
        yield Upload(Path(folder), destination)
        files = filter(Path.is_file, Path(folder).rglob("*"))
        for path in sorted(files, key=lambda path: path.name == MANIFEST):
            destination.put(path, str(path.relative_to(folder)))
