"""A folder at a URL, in any file system that fsspec knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypha_ray.data.slices import UNREADABLE
from hypha_ray.data.storage.url_errors import explain
from hypha_ray.errors import AuthenticationError, DataError, TryAgainError
from hypha_ray.redaction import redacted
from hypha_ray.store.remote.file_systems import TooLargeError, is_http, is_s3, open_url
from hypha_ray.store.remote.retry_after import retry_after_s
from hypha_ray.store.remote.s3_errors import Cause, cause_of

T = TypeVar("T")

WAITS_S = (0.5, 2.0, 8.0)
"""Seconds between tries of a request that may succeed later; longer if the server asks for that."""
LONGEST_WAIT_S = 60.0
"""Longest time in seconds for which a server may ask before the next try."""


class LargeError(DataError):
    """A file is larger than allowed."""


def is_url(place: str) -> bool:
    """Whether a place is a URL, and no folder."""
    return "://" in place


def name_of(place: str) -> str:
    """Name of a folder; that of a URL is without its query, which may be secret."""
    path = place.partition("?")[0] if is_url(place) else place
    return path.rstrip("/").rpartition("/")[2]


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
            if limit_bytes is None:
                options: dict[str, int] = {}
            elif is_http(fs):
                options = {"limit_bytes": limit_bytes}  # Not every server tells a size, or knows ranges.
            else:
                options = {}
                if (size := fs.size(path) or 0) > limit_bytes:
                    raise TooLargeError(f"{size:,} bytes")
            content: bytes = fs.cat_file(path, **options)
            return content

        try:
            return self._tried(name, read)
        except TooLargeError as error:
            place = redacted(f"{self.url}/{name}")
            fix = "check the URL, or prepare the dataset again"
            raise LargeError(UNREADABLE, f"{place} is too large", str(error), f"{limit_bytes:,} bytes", fix) from None

    def put(self, file: Path, name: str) -> None:
        """Copy a file of this machine there."""

        def put(fs: Any, path: str) -> None:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(file), path)

        self._tried(name, put)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        try:
            self._tried(name, lambda fs, path: fs.rm_file(path))
        except DataError:
            return

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return bool(self._tried(name, lambda fs, path: fs.exists(path)))

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Size of each file of a folder, by path below the URL; None: unknown. Empty if the place can't list them."""
        try:
            fs, root = self._place()
            fs.invalidate_cache()
            rows = fs.find(f"{root}/{folder}".rstrip("/"), detail=True)
        except Exception:  # Not every place can list its files.
            return {}
        return {
            name.removeprefix(root).lstrip("/"): row.get("size") for name, row in rows.items() if name.startswith(root)
        }

    def _place(self) -> tuple[Any, str]:
        """File system, and the folder in it."""
        if self._opened is None:
            fs, root = open_url(self.url, self._anew)
            self._opened = (fs, root.rstrip("/"))
            self._anew = False
        return self._opened

    def _tried(self, name: str, request: Callable[[Any, str], T]) -> T:
        """Result of a request for a file."""
        for wait_s in (*WAITS_S, None):
            try:
                fs, root = self._place()
                folder, mark, query = root.partition("?") if "?" in self.url else (root, "", "")
                return request(fs, f"{folder.rstrip('/')}/{name}{mark}{query}")
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

    def _cause(self, error: Exception, name: str) -> Cause | None:
        """Cause that an object store tells; None if it is none, or tells none."""
        if self._opened is None or not is_s3(self._opened[0]):
            return None
        fs, root = self._opened
        return cause_of(error, fs, f"{root}/{name}")
