"""Cache of files on a machine's disk, by content: shared by all datasets and jobs of the machine.

    <folder>/<first two characters of the sha256>/<sha256>

There is no lock. A file appears by renaming, two writers write the same bytes, and a file that another process has
removed is fetched again. Only files with such names are ever removed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hypha_ray.modes import make_private, opener

SHARE, MOST_BYTES = 5, 50_000_000_000
"""Default limit: one part in so many of the free disk, and that many bytes at most."""
_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.part)?")


class DiskCache:
    """Keeps the files used last, within a limit.

    Args:
        folder: folder of the cache, which may not exist yet.
        limit_bytes: most bytes of all files together; None: a share of the free disk.

    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self._folder, self._given = folder, limit_bytes

    @property
    def limit_bytes(self) -> int:
        """Most bytes of all files together."""
        if self._given is not None:
            return self._given
        above = next(path for path in (self._folder, *self._folder.parents) if path.exists())
        return min(MOST_BYTES, (shutil.disk_usage(above).free + sum(size for _, _, size in self._files())) // SHARE)

    def read(self, sha256: str) -> bytes | None:
        """Content of a file, which isn't checked; None if the cache lacks it."""
        path = self._path(sha256)
        with suppress(OSError):
            data = path.read_bytes()
            os.utime(path)  # It is the file used last.
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
            self._shrink(limit_bytes)  # Others may have written meanwhile, and the last one to look sees all files.
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

    def _shrink(self, bytes: int) -> None:
        """Remove files, those used longest ago first, until the others have at most so many bytes."""
        files = sorted(self._files())
        total = sum(size for _, _, size in files)
        for _, path, size in files:
            if total <= bytes:
                return
            with suppress(FileNotFoundError):
                path.unlink()
            total -= size

    def _files(self) -> Iterator[tuple[int, Path, int]]:
        """Time of the last use, path and size of each file, also of those that a killed process left half written."""
        for path in self._folder.glob("??/*"):
            with suppress(OSError):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode) and _NAME.fullmatch(path.name) and path.name[:2] == path.parent.name:
                    yield facts.st_mtime_ns, path, facts.st_size

    def _path(self, sha256: str) -> Path:
        return self._folder / sha256[:2] / sha256


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        make_private(folder)
