"""Atomic writes of files, and JSON records with checksums."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from hypha_ray.errors import TryAgainError
from hypha_ray.failpoints import failpoint
from hypha_ray.files import make_private, opener

_MEGABYTE = 1_000_000
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


def sealed(record: Mapping[str, Any]) -> bytes:
    """Encode a record as JSON; its last field, ``checksum``, is the sha256 of the other fields in compact form."""
    body = json.loads(json.dumps(record))
    compact = json.dumps(body, separators=(",", ":"))
    checksum = hashlib.sha256(compact.encode()).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=1).encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """Decode a record written by `sealed`.

    Raises:
        ValueError: the data are damaged.

    """
    body = json.loads(data)
    if not isinstance(body, dict) or body.pop("checksum", None) is None or sealed(body) != data:
        raise ValueError("its checksum doesn't fit")
    return body


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, readable only by its owner; fsyncs it at the end."""
    stem, _, _ = path.name.partition(".")
    failpoint("store.write", stem.replace("-", "_"))
    with open(path, "wb", opener=opener) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write a file and fsync it."""
    with new_file(path) as file:
        file.write(data)


def publish(temporary: Path, path: Path) -> None:
    """Rename a finished file or folder to its final name, and fsync the parent folder."""
    temporary.rename(path)
    sync(path.parent)


def publish_once(temporary: Path, path: Path) -> None:
    """Like `publish`, for a file that must not exist yet: of several processes, only one succeeds.

    Raises:
        FileExistsError: a file of that name exists.

    """
    try:
        path.hardlink_to(temporary)
        temporary.unlink()
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        temporary.rename(path)  # Without hard links, only the store's lock protects against a second writer.
    sync(path.parent)


def sync(path: Path) -> None:
    """Fsync a file, whichever process wrote it; or a folder, and so the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents where they are missing, and fsync their names.

    A new folder is accessible only to its owner; new parents get the umask's mode.
    """
    missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        if path == folder:
            make_private(path)
        with suppress(PermissionError):  # A folder may be writable and not readable; fsync needs it readable.
            sync(path.parent)


def sweep(folder: Path) -> None:
    """Remove temporary files that a crash left in a folder."""
    for leftover_file in folder.glob("round_*.tmp"):
        shutil.rmtree(leftover_file, ignore_errors=True)
        leftover_file.unlink(missing_ok=True)


@contextmanager
def room_for(path: Path, need_bytes: int) -> Iterator[None]:
    """Check for free space, and turn a full or unwritable disk into an error with free and needed space.

    The parent folder of `path` is created.

    Raises:
        TryAgainError: the file doesn't fit, or can't be written.

    """
    try:
        make_folder(path.parent)
        if shutil.disk_usage(path.parent).free < need_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        raise _unwritable(path, need_bytes, error) from error


def _unwritable(path: Path, need_bytes: int, error: OSError) -> TryAgainError:
    parents = path.absolute().parents
    folder = next(parent for parent in parents if parent.is_dir())
    free_mb = shutil.disk_usage(folder).free / _MEGABYTE
    need_mb = need_bytes / _MEGABYTE
    return TryAgainError(
        "STORE001",
        f"{path} can't be written: {error.strerror or error}",
        got=f"{free_mb:.1f} MB of free space",
        allowed=f"at least {need_mb:.1f} MB in a folder that can be written",
        fix="make room there, or choose another run.dir; what was saved before is intact",
    )
