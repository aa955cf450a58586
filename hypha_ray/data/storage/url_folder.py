"""A folder at a URL, in any file system that fsspec knows; errors of file systems with a remedy for each cause."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hypha_ray.data.slices import UNREADABLE
from hypha_ray.errors import (
    AuthenticationError,
    ConfigError,
    DataError,
    ExpiredError,
    HubError,
    HyphaError,
    TryAgainError,
    line_of,
)
from hypha_ray.store.file_systems import TooLargeError, is_http, is_s3, open_url
from hypha_ray.store.remote_errors import Cause, cause_of, chain, refusal_of_url, retry_after_s
from hypha_ray.texts import redacted

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


_AGAIN = (408, 425, 429)
"""Statuses of HTTP below 500 after which another try may succeed."""
_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "DefaultCredentialsError",
}
"""Classes of errors of botocore and google.auth."""


class MissingError(DataError):
    """There is nothing at a place."""


def explain(error: Exception, url: str, what: str, cause: Cause | None = None) -> HyphaError:
    """The error to raise in place of one of a file system; its causes are looked at too.

    Args:
        error: error that the file system raised.
        url: folder of the dataset.
        what: name of the file in it.
        cause: cause that an object store has told.

    """
    place = redacted(f"{url}/{what}")
    got = line_of(error, url)
    links = list(chain(error))
    if cause is not None:
        return _of_store(cause, place, got)
    if (refusal := refusal_of_url(error, url)) is not None:
        return refusal
    return _of_answer(links, place, got)


def _of_answer(links: list[BaseException], place: str, got: str) -> HyphaError:
    """Error of a place that has answered, or that can't be reached."""
    status = status_of(links)
    if _is_refused(links, status):
        fix = "give this machine access, such as AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS or HF_TOKEN"
        return AuthenticationError("AUTH004", f"access to {place} is refused", got, fix=fix)
    if isinstance(links[0], FileNotFoundError) or status in (404, 410):
        return MissingError(UNREADABLE, f"there is nothing at {place}", got, fix="check the URL")
    if any(isinstance(link, socket.gaierror) and link.errno == socket.EAI_NONAME for link in links):
        return MissingError(UNREADABLE, f"the host of {place} doesn't exist", got, fix="check the URL and the network")
    if _may_pass(links, status):
        return HubError("DATA065", f"{place} can't be reached now", got, fix="try again; the run goes on from there")
    return DataError(UNREADABLE, f"{place} can't be read", got, fix="check the URL, and the settings for its kind")


def _of_store(cause: Cause, place: str, got: str) -> HyphaError:
    """Error of an object store that has told its cause."""
    problem = f"{place}: {cause.problem}"
    match cause.kind:
        case "expired":
            return ExpiredError("AUTH004", problem, got, fix=f"{cause.fix}; the same command goes on from there")
        case "credentials":
            return AuthenticationError("AUTH004", problem, got, fix=cause.fix)
        case "settings":
            return ConfigError("DATA066", problem, got, fix=cause.fix)


def _is_refused(links: list[BaseException], status: int | None) -> bool:
    """Whether access needs credentials, or others."""
    names = {type(link).__name__ for link in links}
    return status in (401, 403, 407) or isinstance(links[0], PermissionError) or bool(names & _CREDENTIALS)


def _may_pass(links: list[BaseException], status: int | None) -> bool:
    """Whether another try may succeed."""
    if status is not None:
        return (status >= 500 and status != 501) or status in _AGAIN
    transient = (ConnectionError, TimeoutError, socket.gaierror)
    numbers = (errno.EBUSY, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
    names = ("ConnectionError", "Timeout", "TimeoutError", "ConnectorError", "Disconnected", "PayloadError")
    return any(
        isinstance(link, transient) or getattr(link, "errno", None) in numbers or type(link).__name__.endswith(names)
        for link in links
    )


def status_of(links: list[BaseException]) -> int | None:
    """Status of HTTP in an error and its causes."""
    return next((status for link in links if (status := _status(link)) is not None), None)


def _status(error: BaseException) -> int | None:
    """Status of HTTP in an error of aiohttp, of huggingface_hub or of botocore."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
    return found if isinstance(found, int) else None
