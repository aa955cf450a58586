"""The run directory, which holds all files of a run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypha_ray.config.load import CONFIG
from hypha_ray.errors import ConfigError
from hypha_ray.modes import make_tree_private, opener
from hypha_ray.redaction import redacted
from hypha_ray.store.disk import make_folder, publish, write_file
from hypha_ray.store.lock import Held, Lock

LOCK = "driver.lock"
_ATTEMPT = re.compile(r"attempt_(\d{3,})\.log")
_HANDLER = "attempt"


def home() -> Path:
    """Folder of all runs and datasets: ``$HYPHA_RAY_HOME``, or ``~/hypha_ray``."""
    return Path(os.environ.get("HYPHA_RAY_HOME") or Path.home() / "hypha_ray").absolute()


def runs(parent: str | None) -> Path:
    """Folder of the runs of a job with this `run.dir`."""
    return Path(parent).expanduser().absolute() if parent else home()


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
        directory = cls(parent.expanduser().absolute() / name)
        if directory.begun:
            what = f"run.name: there is a run {name!r} in {parent}"
            raise ConfigError("RUN001", what, fix="choose another run.name, or leave it out to get a new one")
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
        """Become the only driver of the run until this process ends; creates the folder, private to its owner.

        Raises:
            ConfigError: another driver has the lock, or the folder can't be written.

        """
        try:
            with self._writable():
                make_folder(self.path)
                lock = Lock.acquire(self.path / LOCK)
                make_tree_private(self.path)
                return lock
        except Held as held:
            got = f"pid {held.pid or '?'} on {held.host or '?'} since {held.since or '?'}"
            fix = "wait until it has ended, or choose another run.name"
            raise ConfigError("RUN002", f"run {self.path.name} is running already", got, fix=fix) from None

    def configure(self, config: str) -> None:
        """Write the run's job file; the last attempt's is kept as ``config.attempt_<n>.toml`` if it differs.

        Raises:
            ConfigError: the folder can't be written.

        """
        former = f"config.attempt_{self._last_attempt():03d}.toml"
        text = self.config.read_text(encoding="utf-8") if self.begun else config
        if text != config and not (self.path / former).exists():
            self.write(former, redacted(text))
        self.write(CONFIG, config)

    def write(self, name: str, text: str) -> None:
        """Write a small file atomically.

        Raises:
            ConfigError: the folder can't be written.

        """
        draft = self.path / f".{name}.part"
        with self._writable():
            make_folder(self.path)
            write_file(draft, text.encode())
            publish(draft, self.path / name)

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
        make_folder(self._log_file(attempt).parent)
        open(self._log_file(attempt), "a", opener=opener).close()

    def _claim(self, attempt: int) -> bool:
        file = self._log_file(attempt)
        try:
            open(file, "x", opener=opener).close()
        except FileExistsError:
            return False
        _log_to(file)
        latest = file.with_name("latest")
        latest.unlink(missing_ok=True)
        latest.symlink_to(file.name)
        return True

    def _last_attempt(self) -> int:
        found = (_ATTEMPT.fullmatch(path.name) for path in (self.path / "logs").glob("attempt_*.log"))
        return max((int(name[1]) for name in found if name), default=0)

    def _log_file(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt_{attempt:03d}.log"

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"run.dir: {self.path} can't be written"
            raise ConfigError("CFG008", what, got=error.strerror or str(error), fix="choose another run.dir") from None


class _Redacting(logging.Formatter):
    """Formatter that hides the secrets of URLs, in tracebacks as well."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def _log_to(file: Path) -> None:
    """Log to a file instead of the previous one."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if handler.name == _HANDLER]:
        root.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.name = _HANDLER
    handler.setFormatter(_Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)
    logging.getLogger("hypha_ray").setLevel(logging.INFO)
