"""The run directory, which holds all files of a run: its locks, job file, logs, and list of damaged slices.

Locks between processes are those of `flock`, which the kernel releases when the holder ends, however it ends.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from hypha_ray.config.load import CONFIG
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.files import make_tree_private, opener
from hypha_ray.store.disk import make_folder, publish, room_for, sealed, unsealed, write_file
from hypha_ray.texts import redacted

_POLL_S = 0.05
_TAKEOVER_S = 10.0
"""Longest wait in seconds for a store that is being killed."""
_GLANCE_S = 0.2
"""Longest wait in seconds for a process that only looks whether the lock is held."""
_locks: set[Lock] = set()
LOCK = "driver.lock"
_ATTEMPT = re.compile(r"attempt_(\d{3,})\.log")
_HANDLER = "attempt"
QUARANTINE = "quarantine.json"


class LockedError(Exception):
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
        _locks.add(self)

    @classmethod
    def acquire(cls, path: Path, wait_s: float = 0.0) -> Lock:
        """Take a lock, waiting for its holder if need be; write process id, host and time into its file.

        The file is created if it is missing, and never removed.

        Raises:
            LockedError: another process still has the lock.
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
        _locks.discard(self)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
    except LockedError as error:
        problem = f"another process writes to {directory}"
        raise CheckpointError("STORE009", problem, got=str(error), fix="end it, or wait until it has ended") from None


def holder_of(path: Path) -> LockedError | None:
    """Process that holds a lock; None if none does. The lock is shared for a moment, and no file is made.

    Raises:
        OSError: the file is there and can't be read.

    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    finally:
        os.close(descriptor)
    return None


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


def _holder(descriptor: int) -> LockedError:
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
        return LockedError(int(record["pid"]), str(record["host"]), str(record["since"]))
    except (ValueError, KeyError, TypeError):
        return LockedError(None, None, None)


def _forget() -> None:
    """Release inherited locks in a forked child."""
    for lock in tuple(_locks):
        lock.release()


os.register_at_fork(after_in_child=_forget)


def home() -> Path:
    """Folder of all runs and datasets: ``$HYPHA_RAY_HOME``, or ``~/hypha_ray``."""
    folder = os.environ.get("HYPHA_RAY_HOME") or Path.home() / "hypha_ray"
    return Path(folder).absolute()


def runs(parent: str | None) -> Path:
    """Folder of the runs of a job with this `run.dir`."""
    if not parent:
        return home()
    return Path(parent).expanduser().absolute()


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str, config: str) -> RunDirectory:
        """Create the folder of a new run, with its resolved configuration.

        Raises:
            ConfigError: a run of that name exists, or the folder can't be written.

        """
        folder = parent.expanduser().absolute()
        directory = cls(folder / name)
        if directory.begun:
            problem = f"run.name: there is a run {name!r} in {parent}"
            raise ConfigError("RUN001", problem, fix="choose another run.name, or leave it out to get a new one")
        directory.configure(config)
        return directory

    @property
    def config(self) -> Path:
        """The run's job file; the run has begun once it exists."""
        return self.path / CONFIG

    @property
    def begun(self) -> bool:
        """Whether the run has begun."""
        return self.config.is_file()

    def lock(self) -> Lock:
        """Take the lock of the run's driver until this process ends; creates the folder, private to its owner.

        Raises:
            ConfigError: another driver has the lock, or the folder can't be written.

        """
        try:
            with self._writable():
                make_folder(self.path)
                lock = Lock.acquire(self.path / LOCK, _GLANCE_S)
                make_tree_private(self.path)
                return lock
        except LockedError as error:
            got = f"pid {error.pid or '?'} on {error.host or '?'} since {error.since or '?'}"
            fix = "wait until it has ended, or choose another run.name"
            raise ConfigError("RUN002", f"run {self.path.name} is running already", got, fix=fix) from None

    def configure(self, config: str) -> None:
        """Write the run's job file; the last attempt's is kept as ``config.attempt_<n>.toml`` if it differs.

        Raises:
            ConfigError: the folder can't be written.

        """
        former_name = f"config.attempt_{self._last_attempt():03d}.toml"
        text = self.config.read_text(encoding="utf-8") if self.begun else config
        if text != config and not (self.path / former_name).exists():
            self.write(former_name, redacted(text))
        self.write(CONFIG, config)

    def write(self, name: str, text: str) -> None:
        """Write a small file atomically.

        Raises:
            ConfigError: the folder can't be written.

        """
        draft_file = self.path / f".{name}.part"
        with self._writable():
            make_folder(self.path)
            write_file(draft_file, text.encode())
            publish(draft_file, self.path / name)

    def begin_attempt(self) -> int:
        """Begin a scheduler's attempt; returns its number, counted from 1 over all drivers of the run.

        From now on this process logs to ``logs/attempt_<n>.log``; ``logs/latest`` links to it.

        Raises:
            ConfigError: the folder can't be written.

        """
        with self._writable():
            make_folder(self.path / "logs")
            attempt = self._last_attempt() + 1
            while not self._claim(attempt):
                attempt += 1
        return attempt

    def count_from(self, attempt: int) -> None:
        """Make `attempt` the latest number, so that the next one follows it."""
        file = self._log_file(attempt)
        make_folder(file.parent)
        open(file, "a", opener=opener).close()

    def _claim(self, attempt: int) -> bool:
        file = self._log_file(attempt)
        try:
            open(file, "x", opener=opener).close()
        except FileExistsError:
            return False
        _log_to(file)
        latest_link = file.with_name("latest")
        latest_link.unlink(missing_ok=True)
        latest_link.symlink_to(file.name)
        return True

    def _last_attempt(self) -> int:
        last_attempt = 0
        for path in (self.path / "logs").glob("attempt_*.log"):
            match = _ATTEMPT.fullmatch(path.name)
            if match:
                last_attempt = max(last_attempt, int(match[1]))
        return last_attempt

    def _log_file(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt_{attempt:03d}.log"

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = f"run.dir: {self.path} can't be written"
            got = error.strerror or str(error)
            raise ConfigError("CFG008", problem, got=got, fix="choose another run.dir") from None


class _Redacting(logging.Formatter):
    """Formatter that hides the secrets of URLs, in tracebacks as well."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def _log_to(file: Path) -> None:
    """Log to a file instead of the previous one."""
    root = logging.getLogger()
    for previous in tuple(root.handlers):
        if previous.name == _HANDLER:
            root.removeHandler(previous)
            previous.close()
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.name = _HANDLER
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.getLogger("hypha_ray").setLevel(logging.INFO)


def quarantined(directory: Path) -> dict[int, str]:
    """Reasons of quarantined slices, by index.

    Raises:
        CheckpointError: the list is damaged.

    """
    path = directory / QUARANTINE
    try:
        slices = unsealed(path.read_bytes())["slices"]
        return {int(index): str(reason) for index, reason in slices.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, AttributeError) as error:
        fix = "remove it: what is damaged will be found again"
        raise CheckpointError("STORE014", f"{path} is damaged", str(error), fix=fix) from None


def quarantine(directory: Path, index: int, reason: str) -> None:
    """Leave a slice out for the rest of the run. Idempotent.

    Raises:
        CheckpointError: the list is damaged.
        TryAgainError: the disk is full or can't be written.

    """
    reasons = {index: reason} | quarantined(directory)
    slices = {str(number): reasons[number] for number in sorted(reasons)}
    path = directory / QUARANTINE
    data = sealed({"slices": slices})
    temporary = path.with_suffix(".tmp")
    with room_for(path, len(data)):
        write_file(temporary, data)
        publish(temporary, path)
