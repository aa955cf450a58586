"""Cache of files on a machine's disk, by content: shared by all datasets and jobs of the machine.

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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.files import make_private, opener

SHARE = 5
MOST_BYTES = 50_000_000_000
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
        return min(MOST_BYTES, (free_bytes + cached_bytes) // SHARE)

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
            listed_ns, path, size = heapq.heappop(files)
            with suppress(FileNotFoundError):
                used_ns = os.lstat(path).st_mtime_ns
                if used_ns > listed_ns:  # It was used since the subfolder was listed.
                    heapq.heappush(files, (used_ns, path, size))
                    continue
                Path(path).unlink()
            total -= size

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
    settled = age_s > (SETTLED_S if changed_ns % SECOND_NS else SETTLED_SECONDS_S)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                belongs = _NAME.fullmatch(entry.name) and entry.name[:2] == folder.name
                if belongs and stat.S_ISREG(status.st_mode):
                    files.append((status.st_mtime_ns, entry.path, status.st_size))
                    total_bytes += status.st_size
                    settled &= not entry.name.endswith(".part")  # It may grow.
    return _Account(changed_ns, seen_s, settled, files, total_bytes)


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        make_private(folder)
