"""Files that are wholly there or not at all, and JSON records that know when they are damaged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypha_ray.errors import TryAgainError

_MEGABYTE = 1_000_000


def sealed(record: Mapping[str, Any]) -> bytes:
    """Encode a record as JSON; its last field, ``checksum``, is the sha256 of the other fields in compact form."""
    body = json.loads(json.dumps(record))
    checksum = hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()
    return json.dumps({**body, "checksum": checksum}, indent=1).encode()


def unsealed(data: bytes) -> dict[str, Any]:
    """Decode what `sealed` gave.

    Raises:
        ValueError: a bit is not as it was written.

    """
    body = json.loads(data)
    if not isinstance(body, dict) or body.pop("checksum", None) is None or sealed(body) != data:
        raise ValueError("its checksum doesn't fit")
    return body


def write_file(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its name, and wait until the disk has that too."""
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has a folder's list of names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def room_for(path: Path, need_bytes: int) -> Iterator[None]:
    """Turn a full or unwritable disk into an error that says how much is missing, before or while it is written to.

    Args:
        path: what will be written; its parent folder is made.
        need_bytes: size of it.

    Raises:
        TryAgainError: it doesn't fit, or can't be written.

    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < need_bytes:
            raise OSError("no space left on device")
        yield
    except OSError as error:
        raise _unwritable(path, need_bytes, error) from error


def _unwritable(path: Path, need_bytes: int, error: OSError) -> TryAgainError:
    folder = next(folder for folder in path.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(folder).free
    return TryAgainError(
        "STORE001",
        f"{path} can't be written: {error.strerror or error}",
        got=f"{free / _MEGABYTE:.1f} MB of free space",
        allowed=f"at least {need_bytes / _MEGABYTE:.1f} MB in a folder that can be written",
        fix="make room there, or choose another run.dir; what was saved before is intact",
    )
