"""Surroundings of programs that aren't trusted: work directories, environment variables, and temporary folders.

A program writes to its work directory too. So every path is opened beneath the directory, component by component,
without following a link. This holds for reading, writing and removing, and for our own files too. Only a regular file
with one name and the expected size is read. The file is copied, and the copy is hashed and used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from hypha_ray.bridge.bridge_pb2 import Content
from hypha_ray.errors import BridgeError, TryAgainError

MAX_PATH = 512
"""Most bytes in a path."""
_CHUNK_BYTES = 1 << 20
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ALLOWED = "a relative path of plain names with / between them, at most 512 bytes"
_HANDED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|TERM|XDG_RUNTIME_DIR|DOCKER_HOST"
    r"|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|NODE_PATH|SSL_CERT_(FILE|DIR)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|OMP_(PLACES|PROC_BIND|WAIT_POLICY)|MKL_THREADING_LAYER"
    r"|CUDA_(VISIBLE_DEVICES|DEVICE_ORDER|HOME|PATH|LAUNCH_BLOCKING)|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)"
    r"|(HIP|ROCR)_VISIBLE_DEVICES|PYTORCH_CUDA_ALLOC_CONF|HF_HOME|HF_HUB_(CACHE|OFFLINE)|TRANSFORMERS_OFFLINE"
)
"""Names of variables that a program gets of a worker's; see docs/bridge.md."""
PREFIX = "hypha-bridge-"
SPOOL = "hypha-spool-"
TRAINER = "hypha-trainer-"
WEIGHTS = "hypha-weights-"
LOCAL_RAY = "hypha-ray-"
"""Prefixes of folder names: work directories of drivers, copies of trainers' files, directories of remote trainers,
weights for servers that generate, sockets of a local Ray."""


def split_path(path: str) -> list[str]:
    """The components of a path.

    Raises:
        BridgeError: PATH001 it isn't a plain relative path.

    """
    names = path.split("/")
    is_plain = all(name not in ("", ".", "..") and name.isprintable() and "\\" not in name for name in names)
    has_drive = len(names[0]) > 1 and names[0][1] == ":"
    if not is_plain or has_drive or len(path.encode(errors="surrogatepass")) > MAX_PATH or max(map(len, names)) > 255:
        raise BridgeError("PATH001", "a path that isn't allowed", got=repr(path[:80]), allowed=_ALLOWED)
    return names


def content_of(file: Path) -> Content:
    """Size and sha256 of a file in a private folder."""
    with file.open("rb") as opened_file:
        sha256 = hashlib.file_digest(opened_file, "sha256").digest()
        return Content(size=opened_file.tell(), sha256=sha256)


class WorkDirectory:
    """The work directory of one connection.

    Args:
        path: an existing directory; links are allowed on the way to it, since we choose it.

    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve(strict=True)
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the directory; may be called twice."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def copy(self, path: str, expected: Content, to: Path) -> None:
        """Copy a file announced by the other side to a new private file.

        Args:
            path: path beneath this directory.
            expected: announced size and sha256.
            to: the copy, which is removed if anything is wrong with the file.

        Raises:
            BridgeError: PATH001 … PATH006, see `open`; PATH005 if it isn't the announced file.
            TryAgainError: the copy can't be written.

        """
        with self.open(path, expected.size) as source, _writing(to, to.unlink), to.open("xb") as target:
            sha256 = hashlib.sha256()
            size_bytes = 0
            while chunk := source.read(min(_CHUNK_BYTES, expected.size + 1 - size_bytes)):
                sha256.update(chunk)
                target.write(chunk)
                size_bytes += len(chunk)
            if size_bytes != expected.size or sha256.digest() != expected.sha256:
                hex_digest = sha256.hexdigest()
                expected_digest = expected.sha256.hex()
                got = f"{size_bytes} bytes, sha256 {hex_digest[:12]}…"
                allowed = f"{expected.size} bytes, sha256 {expected_digest[:12]}…"
                raise BridgeError("PATH005", f"{path} isn't the announced file", got, allowed)

    def content(self, path: str) -> Content:
        """Size and sha256 of a file.

        Raises:
            BridgeError: as `open`.

        """
        with self.open(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            sha256 = hashlib.file_digest(file, "sha256")
            return Content(size=size_bytes, sha256=sha256.digest())

    @contextlib.contextmanager
    def open(self, path: str, size_bytes: int | None = None) -> Iterator[FileIO]:
        """Open a file for reading; `size_bytes` is its required size, None: any.

        Raises:
            BridgeError: PATH001 the path isn't allowed, PATH002 it leads over a link, PATH003 it isn't a private
                regular file, PATH004 it has another size, PATH006 it doesn't exist.

        """
        *folders, name = split_path(path)
        with self._folder(folders, path) as folder:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            descriptor = _open(name, flags, folder, path)
        try:
            _check(os.fstat(descriptor), path, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        with FileIO(descriptor, "rb") as file:
            yield file

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """Create a file in an existing folder beneath the directory; it is removed if writing fails.

        Raises:
            BridgeError: PATH001, PATH002, PATH006 as `open`; PATH007 the file exists.
            TryAgainError: PATH010 it can't be written.

        """
        *folders, name = split_path(path)
        with self._folder(folders, path) as folder, _create(name, folder, path) as file:
            yield file

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> Content:
        """Write a file, replacing anything of its name; returns size and sha256 of the contents.

        Raises:
            BridgeError: PATH001, PATH002, PATH006 as `open`.
            TryAgainError: PATH010 it can't be written.

        """
        *folders, name = split_path(path)
        sha256 = hashlib.sha256()
        size_bytes = 0
        draft_name = f".{secrets.token_hex(8)}.part"
        with self._folder(folders, path) as folder, _create(draft_name, folder, path) as file:
            for chunk in chunks:
                sha256.update(chunk)
                size_bytes += file.write(chunk)
            file.flush()
            os.rename(draft_name, name, src_dir_fd=folder, dst_dir_fd=folder)
        return Content(size=size_bytes, sha256=sha256.digest())

    def unlink(self, path: str) -> None:
        """Remove a file if it exists.

        Raises:
            BridgeError: PATH001, PATH002 as `open`; PATH006 its folder is missing, or it can't be removed.

        """
        *folders, name = split_path(path)
        with self._folder(folders, path) as folder:
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise BridgeError("PATH006", f"{path} can't be removed", error.strerror or str(error)) from None

    @contextlib.contextmanager
    def _folder(self, names: list[str], path: str) -> Iterator[int]:
        """Open a folder beneath this one, and yield its descriptor."""
        descriptor = os.dup(self._descriptor)
        try:
            for name in names:
                subfolder = _open(name, _FOLDER_FLAGS, descriptor, path)
                os.close(descriptor)
                descriptor = subfolder
            yield descriptor
        finally:
            os.close(descriptor)


def _open(name: str, flags: int, folder: int, path: str) -> int:
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
                raise BridgeError("PATH007", f"{path} already exists") from None
            case errno.ENOENT | errno.ENOTDIR:
                raise BridgeError("PATH006", f"{path} doesn't exist") from None
        raise BridgeError("PATH006", f"{path} can't be opened", error.strerror or str(error)) from None


@contextlib.contextmanager
def _create(name: str, folder: int, path: str) -> Iterator[BinaryIO]:
    """Create a file in an open folder; it is removed if writing fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = _open(name, flags, folder, path)
    with _writing(path, lambda: os.unlink(name, dir_fd=folder)), os.fdopen(descriptor, "wb") as file:
        yield file


def _check(facts: os.stat_result, path: str, size_bytes: int | None) -> None:
    """Check that a file is regular and private, and has that size."""
    if not stat.S_ISREG(facts.st_mode):
        raise BridgeError("PATH003", f"{path} isn't a regular file", got=_kind(facts.st_mode))
    if facts.st_nlink != 1 or facts.st_uid != os.geteuid():
        got = f"{facts.st_nlink} names, user {facts.st_uid}"
        raise BridgeError("PATH003", f"{path} isn't private", got, f"one name, user {os.geteuid()}")
    if size_bytes is not None and facts.st_size != size_bytes:
        raise BridgeError("PATH004", f"{path} has another size", str(facts.st_size), f"{size_bytes} bytes")


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISFIFO(mode):
        return "a FIFO"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device"


@contextlib.contextmanager
def _writing(shown_path: object, remove: Callable[[], None]) -> Iterator[None]:
    """Remove a new file that can't be completed."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove()
        if not isinstance(error, OSError):
            raise
        problem = f"{shown_path} can't be written"
        why = error.strerror or str(error)
        raise TryAgainError("PATH010", problem, why, fix="free some space on the disk") from None


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a program gets of a worker's: any other one may hold a secret."""
    return {name: value for name, value in environment.items() if _HANDED_ON.fullmatch(name)}


class Scratch:
    """A private folder that lasts as long as this process; a lock shows other processes that it is in use.

    Args:
        kind: prefix of the folder's name.
        parent: folder that it is made in; None: that of temporary files.

    """

    def __init__(self, kind: str, parent: str | None = None) -> None:
        prefix = f"{kind}{os.getpid()}-"
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder; may be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """Make a folder of that kind, and remove it at the end."""
    scratch = Scratch(prefix)
    try:
        yield scratch.path
    finally:
        scratch.close()


def sweep(parent: str | None = None) -> None:
    """Remove the folders that this user's killed processes left behind, there or among temporary files."""
    for prefix in (PREFIX, SPOOL, TRAINER, WEIGHTS, LOCAL_RAY):
        for folder in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
            pid = folder.name.removeprefix(prefix).partition("-")[0]
            if pid.isdigit() and not _is_alive(int(pid)) and _is_unused(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_unused(folder: Path) -> bool:
    """Whether a folder is this user's and unlocked; its process may run in another container, invisible here."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        facts = os.fstat(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
