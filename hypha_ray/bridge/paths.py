"""Files of a work directory, which another process that isn't trusted writes to as well.

A path from outside is opened beneath the directory, component by component, without following a link; only a regular
file of one name and of the expected size is read; and what is used afterwards is a copy, of which the hash is taken.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from hypha_ray.bridge.bridge_pb2 import Content
from hypha_ray.errors import BridgeError, TryAgainError

MAX_PATH = 512
"""Bytes of a path."""
_STEP = 1 << 20
_ALLOWED = "a relative path of plain names with / between them, 512 bytes at most"


def parts(path: str) -> list[str]:
    """The components of a path.

    Raises:
        BridgeError: PATH001 it isn't a plain relative path.

    """
    names = path.split("/")
    plain = all(name not in ("", ".", "..") and name.isprintable() and "\\" not in name for name in names)
    drive = len(names[0]) > 1 and names[0][1] == ":"
    if not plain or drive or len(path.encode(errors="surrogatepass")) > MAX_PATH or max(map(len, names)) > 255:
        raise BridgeError("PATH001", "a path that isn't allowed", got=repr(path[:80]), allowed=_ALLOWED)
    return names


def content_of(file: Path) -> Content:
    """Size and sha256 of a file of our own."""
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").digest()
        return Content(size=opened.tell(), sha256=sha256)


class WorkDirectory:
    """The directory of one connection.

    Args:
        path: an existing directory; links are allowed on the way to it, for that is our own doing.

    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve(strict=True)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the directory; may come twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def copy(self, path: str, expected: Content, to: Path) -> None:
        """Copy a file that the other side has announced to a new one that is ours.

        Args:
            path: beneath this directory.
            expected: what was announced.
            to: the copy, which is gone again if anything is wrong with the file.

        Raises:
            BridgeError: PATH001 … PATH006, see `open`; PATH005 if it isn't what was announced.
            TryAgainError: the copy can't be written.

        """
        with self.open(path, expected.size) as source, _written(to), to.open("xb") as target:
            found, size = hashlib.sha256(), 0
            while chunk := source.read(min(_STEP, expected.size + 1 - size)):
                found.update(chunk)
                target.write(chunk)
                size += len(chunk)
            if size != expected.size or found.digest() != expected.sha256:
                got = f"{size} bytes, sha256 {found.hexdigest()[:12]}…"
                allowed = f"{expected.size} bytes, sha256 {expected.sha256.hex()[:12]}…"
                raise BridgeError("PATH005", f"{path} isn't the file that was announced", got, allowed)

    @contextlib.contextmanager
    def open(self, path: str, size: int) -> Iterator[FileIO]:
        """A file of that size, to read from.

        Raises:
            BridgeError: PATH001 the path isn't allowed, PATH002 it leads over a link, PATH003 it isn't a regular file
                of ours alone, PATH004 its size is another, PATH006 it isn't there.

        """
        *folders, name = parts(path)
        with self._folder(folders, path) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            descriptor = _opened(name, flags, folder, path)
        try:
            _check(os.fstat(descriptor), path, size)
        except BaseException:
            os.close(descriptor)
            raise
        with FileIO(descriptor, "rb") as file:
            yield file

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """A new file beneath the directory, in a folder that is there; gone again if it isn't written whole.

        Raises:
            BridgeError: PATH001, PATH002, PATH006 as `open`; PATH007 there is one.
            TryAgainError: PATH010 it can't be written.

        """
        *folders, name = parts(path)
        with self._folder(folders, path) as folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = _opened(name, flags, folder, path)
            with _written(self.path / path), os.fdopen(descriptor, "wb") as file:
                yield file

    @contextlib.contextmanager
    def _folder(self, names: list[str], path: str) -> Iterator[int]:
        """Descriptor of a folder beneath this one."""
        descriptor = os.dup(self._descriptor)
        try:
            for name in names:
                below = _opened(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, descriptor, path)
                os.close(descriptor)
                descriptor = below
            yield descriptor
        finally:
            os.close(descriptor)


def _opened(name: str, flags: int, folder: int, path: str) -> int:
    try:
        return os.open(name, flags, 0o600, dir_fd=folder)
    except OSError as error:
        match error.errno:
            case errno.ELOOP:
                raise BridgeError("PATH002", f"{path} leads over a link") from None
            case errno.ENOTDIR if _is_link(name, folder):
                raise BridgeError("PATH002", f"{path} leads over a link") from None
            case errno.ENXIO:
                raise BridgeError("PATH003", f"{path} isn't a regular file", got="a socket or device") from None
            case errno.EEXIST:
                raise BridgeError("PATH007", f"{path} is already there") from None
            case errno.ENOENT | errno.ENOTDIR:
                raise BridgeError("PATH006", f"{path} isn't there") from None
        raise BridgeError("PATH006", f"{path} can't be opened", error.strerror or str(error)) from None


def _check(facts: os.stat_result, path: str, size: int) -> None:
    """See that a file is a regular one, ours alone, and of that size."""
    if not stat.S_ISREG(facts.st_mode):
        raise BridgeError("PATH003", f"{path} isn't a regular file", got=_kind(facts.st_mode))
    if facts.st_nlink != 1 or facts.st_uid != os.geteuid():
        got = f"{facts.st_nlink} names, user {facts.st_uid}"
        raise BridgeError("PATH003", f"{path} isn't ours alone", got, f"one name, user {os.geteuid()}")
    if facts.st_size != size:
        raise BridgeError("PATH004", f"{path} has another size", str(facts.st_size), f"{size} bytes")


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a directory", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for is_one, name in kinds.items() if is_one(mode)), "a device")


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Remove a new file that can't be written whole."""
    try:
        yield
    except OSError as error:
        path.unlink(missing_ok=True)
        what = f"{path} can't be written"
        raise TryAgainError("PATH010", what, error.strerror or str(error), fix="look for room on the disk") from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
