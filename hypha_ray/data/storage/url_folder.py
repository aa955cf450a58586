"""A folder at a URL, in any file system that fsspec knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from hypha_ray.data.storage.url_errors import explain
from hypha_ray.errors import DataError, TryAgainError

T = TypeVar("T")

WAITS_S = (0.5, 2.0, 8.0)
"""Seconds between tries of a request that may succeed later."""


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

    def read(self, name: str) -> bytes:
        """Content of a file."""
        content: bytes = self._tried(name, lambda fs, path: fs.cat_file(path))
        return content

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

    def sizes(self, folder: str) -> dict[str, int]:
        """Size of each file of a folder, by path below the URL; empty if the place can't list them."""
        try:
            fs, root = self._place()
            fs.invalidate_cache()
            rows = fs.find(f"{root}/{folder}".rstrip("/"), detail=True)
        except Exception:  # Not every place can list its files.
            return {}
        return {
            name.removeprefix(root).lstrip("/"): row.get("size") or 0
            for name, row in rows.items()
            if name.startswith(root)
        }

    def _place(self) -> tuple[Any, str]:
        """File system, and the folder in it."""
        if self._opened is None:
            fs, root = fsspec.core.url_to_fs(self.url)
            self._opened = fs, root.rstrip("/")
        return self._opened

    def _tried(self, name: str, request: Callable[[Any, str], T]) -> T:
        """Result of a request for a file."""
        for wait_s in (*WAITS_S, None):
            try:
                fs, root = self._place()
                folder, mark, query = root.partition("?") if "?" in self.url else (root, "", "")
                return request(fs, f"{folder.rstrip('/')}/{name}{mark}{query}")
            except Exception as error:  # Each kind of file system has errors of its own.
                problem = explain(error, self.url, name)
                if wait_s is None or not isinstance(problem, TryAgainError):
                    raise problem from None
                time.sleep(wait_s)
        raise AssertionError("unreachable")
