"""Locks between processes by `flock`, which the kernel releases when the holder ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from hypha_ray.errors import CheckpointError
from hypha_ray.modes import opener
from hypha_ray.store.disk import room_for

_POLL_S = 0.05
_TAKEOVER_S = 10.0
"""Longest wait in seconds for a store that is being killed."""


class Held(Exception):
    """Error: another process has the lock. Its pid, host and time are None if they can't be read."""

    def __init__(self, pid: int | None, host: str | None, since: str | None) -> None:
        super().__init__(pid, host, since)
        self.pid = pid
        self.host = host
        self.since = since

    def __str__(self) -> str:
        return f"process {self.pid or '?'} on {self.host or '?'}, since {self.since or '?'}"


class Lock:
    """A held lock; the kernel releases it when the process ends. Also a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def acquire(cls, path: Path, wait_s: float = 0.0) -> Lock:
        """Take a lock, and write process id, host and time into its file.

        Args:
            path: the lock file; it is created if it is missing, and never removed.
            wait_s: longest wait for the holder, in seconds.

        Raises:
            Held: another process still has the lock.
            OSError: the file can't be created.

        """
        descriptor = opener(str(path), os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + wait_s
        try:
            while not _locked(descriptor):
                if time.monotonic() >= deadline:
                    raise _holder(descriptor)
                time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        with suppress(OSError):  # On a full disk the lock is held without a description.
            _sign(descriptor)
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        _held.discard(self)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_store(directory: Path) -> Lock:
    """Take the lock of a run's log; waits for a store that is being killed.

    Raises:
        CheckpointError: another process has the lock.
        TryAgainError: the directory can't be written.

    """
    path = directory / "store.lock"
    try:
        with room_for(path, 0):
            return Lock.acquire(path, _TAKEOVER_S)
    except Held as held:
        what = f"another process writes to {directory}"
        raise CheckpointError("STORE009", what, got=str(held), fix="end it, or wait until it has ended") from None


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(descriptor: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _holder(descriptor: int) -> Held:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return Held(int(record["pid"]), str(record["host"]), str(record["since"]))
    except (ValueError, KeyError, TypeError):
        return Held(None, None, None)


def _forget() -> None:
    """Release inherited locks in a forked child."""
    for lock in tuple(_held):
        lock.release()


_held: set[Lock] = set()
os.register_at_fork(after_in_child=_forget)
