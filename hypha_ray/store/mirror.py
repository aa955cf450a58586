"""Mirrors of a run: all commit records and the newest snapshots, at any destination that fsspec can write to.

    <mirror>/<run>/config.toml, dataset.json, identity.json, commits/round_000012.json, checkpoints/round_000012/…
                   metrics.jsonl, events.jsonl, rollouts.jsonl: with each snapshot, or once a minute if larger than one
                   summary.json, model/…: at the end

A record is copied after the files that it needs, so an interrupted copy is a shorter but valid run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from hypha_ray.errors import CheckpointError, HyphaError, TryAgainError, line_of
from hypha_ray.files import make_private
from hypha_ray.remote_errors import (
    cause_of,
    chain,
    error_of_cause,
    error_of_refusal,
    is_unknown_host,
    may_pass,
    refusal_of_url,
    status_of,
)
from hypha_ray.remote_files import is_s3, open_url
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.disk import publish, room_for, sync
from hypha_ray.store.snapshots import file_sha256, snapshot_path
from hypha_ray.texts import redacted

_STATE = "state.json"
_RECORD = re.compile(r"commits/round_(\d{6,})\.json")
_SNAPSHOT = re.compile(r"checkpoints/round_(\d{6,})/\w[\w.-]*")
_HEADER = re.compile(rf"checkpoints/round_(\d{{6,}})/{_STATE}")
_OTHERS = ("config.toml", "dataset.json", "identity.json", "origin.json", "provenance.json", "quarantine.json")
_HISTORY = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl")
"""Files that grow with every round; each copy is a whole one."""
_RESULTS = ("summary.json", "model", "model-best", "plots", "report.html")
HISTORY_S = 60.0
"""Least time in seconds between two copies of growing files that are larger than a snapshot."""


class Mirror:
    """Copies a run to a mirror.

    Args:
        url: folder or fsspec URL; the run gets its own folder there, with its name.
        directory: the run directory.

    """

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url
        self._directory = directory
        self._log = CommitLog(directory)
        self._destination: _Destination | None = None
        """The destination with its known files; None: they have to be listed."""
        self._reads_credentials = False
        """Whether the destination is to be opened with credentials as they are then."""
        self._first_missing_round = 0
        """First round whose record isn't at the destination; valid unless `_destination` is None."""
        self._history_at = -HISTORY_S

    @property
    def address(self) -> str:
        """The mirror's address without secrets."""
        return _without_secrets(self._url)

    def size(self, round: int | None = None) -> int:
        """Size of a round's snapshot in bytes, or of the run's results; 0 if they can't be read."""
        with suppress(OSError):
            files = self._results() if round is None else self._snapshot(round)
            return _size_bytes(files)
        return 0

    def push(self, round: int, keep: int) -> str | None:
        """Copy the newest commit with its snapshot, and all records that the mirror lacks.

        Args:
            round: number of the newest commit, which has a snapshot.
            keep: number of snapshots to keep at the mirror.

        Returns:
            None; or a description of the problem. Any later push includes a failed one.

        """
        try:
            self._push(self._open(), round, keep)
        except Exception as error:  # Each kind of file system has its own errors.
            reason = self._reason(error)
            self._destination = None
            self._reads_credentials = True
            return f"the copy of round {round + 1} to {self.address} failed: {reason}; the next one includes it"
        return None

    def _reason(self, error: Exception) -> str:
        """Reason of a failure, with its remedy if the destination tells one."""
        line = line_of(error, self._url)
        destination = self._destination
        if destination is not None and is_s3(destination.fs):
            cause = cause_of(error, destination.fs, f"{destination.root}/{_STATE}")
        else:
            cause = cause_of(error)
        return line if cause is None else f"{cause.problem} ({line}): {cause.fix}"

    def complete(self) -> str | None:
        """Copy a run's results; returns None or a description of the problem."""
        try:
            destination = self._open()
            self._copy_small(destination, (*_OTHERS, *_HISTORY))
            for path in self._results():
                destination.put(path, str(path.relative_to(self._directory)))
        except Exception as error:
            return f"the copy of the run's results to {self.address} failed: {self._reason(error)}"
        return None

    def _results(self) -> list[Path]:
        paths = []
        for name in _RESULTS:
            paths += _files(self._directory / name)
        return sorted(paths)

    def _snapshot(self, round: int) -> list[Path]:
        """Files of a snapshot; its header comes last, so that it marks a complete copy."""
        files = sorted(snapshot_path(self._directory, round).iterdir())
        return sorted(files, key=lambda path: path.name == _STATE)

    def _push(self, destination: _Destination, round: int, keep: int) -> None:
        self._copy_snapshot(destination, round)
        self._copy_small(destination, _OTHERS)
        history = [self._directory / name for name in _HISTORY]
        is_small = _size_bytes(history) <= self.size(round)
        if is_small or time.monotonic() - self._history_at >= HISTORY_S:
            self._copy_small(destination, _HISTORY)
            self._history_at = time.monotonic()
        for missing in range(self._first_missing_round, round + 1):
            record = self._log.path(missing)
            destination.put(record, f"commits/{record.name}")
        self._first_missing_round = round + 1
        self._prune(destination, round, keep)

    def _copy_small(self, destination: _Destination, names: Iterable[str]) -> None:
        for name in names:
            path = self._directory / name
            if path.exists():
                destination.put(path, name)

    def _open(self) -> _Destination:
        """Open the destination; its files are listed only if they aren't known."""
        if self._destination is None:
            folder = f"{self._url.rstrip('/')}/{self._directory.name}"
            destination = _Destination(folder, self._reads_credentials)
            self._first_missing_round = self._remove_other_records(destination)
            # `_first_missing_round` stands for the names of records.
            destination.names = {name for name in destination.names if not _RECORD.fullmatch(name)}
            self._destination = destination
        return self._destination

    def _remove_other_records(self, destination: _Destination) -> int:
        """Remove the mirror's records that differ from the run's, newest first; returns the first missing round."""
        for round in reversed(destination.rounds(_RECORD)):
            record = self._log.path(round)
            name = f"commits/{record.name}"
            if record.exists() and destination.read(name) == record.read_bytes():
                return round + 1  # Records form a chain of hashes, so all earlier ones are equal, too.
            destination.remove(name)
        return 0

    def _copy_snapshot(self, destination: _Destination, round: int) -> None:
        """Copy a snapshot; removes an old header first."""
        folder = snapshot_path(self._directory, round)
        name = f"checkpoints/{folder.name}"
        header = f"{name}/{_STATE}"
        if header in destination.names:
            destination.remove(header)
        for path in self._snapshot(round):
            destination.put(path, f"{name}/{path.name}")

    def _prune(self, destination: _Destination, round: int, keep: int) -> None:
        """Remove the mirror's snapshots except the newest `keep`; those of rewound rounds as well."""
        complete = [round_number for round_number in destination.rounds(_HEADER) if round_number < round]
        spared_rounds = {round}
        if keep > 1:
            spared_rounds.update(complete[1 - keep :])
        for round_number in set(destination.rounds(_SNAPSHOT)) - spared_rounds:
            folder = snapshot_path(self._directory, round_number)
            destination.remove(f"checkpoints/{folder.name}")


def has_run(url: str, name: str) -> bool:
    """Whether a mirror has commits of a run of that name; False if it can't be read."""
    with suppress(Exception):  # Each kind of file system has its own errors, of which the first copy tells.
        return bool(_Destination(f"{url.rstrip('/')}/{name}").rounds(_RECORD))
    return False


def fetch(url: str, directory: Path) -> None:
    """Copy a run from its mirror to a run directory; equal files that are there already stay.

    Args:
        url: the run's folder at the mirror.
        directory: destination; it is created if it is missing.

    Raises:
        CheckpointError: the mirror has no run, or the directory has another one.
        ConfigError: no file system can open the URL, or an object store needs other settings.
        AuthenticationError: AUTH004, the mirror refuses the credentials of this machine.
        TryAgainError: the mirror can't be read, or the disk can't be written.

    """
    with _reachable(url, url):
        source = _Destination(url)
    records = [name for name in source.names if _RECORD.fullmatch(name)]
    if not records:
        fix = "is it the folder of the run itself?"
        raise CheckpointError("STORE006", f"there is no run at {_without_secrets(url)}", fix=fix)
    files = []
    for name in source.names:
        if name in (*_OTHERS, *_HISTORY) or _SNAPSHOT.fullmatch(name):
            files.append(name)
    for folder in (directory, directory / "checkpoints"):
        with room_for(folder / "any", 0):
            make_private(folder)
    for name in [*sorted(files), *sorted(records)]:
        _fetch(source, name, directory / name)


def _fetch(source: _Destination, name: str, path: Path) -> None:
    temporary = path.with_name(f"round_{path.name}.tmp")
    with room_for(path, 0):
        with _reachable(name, source.url):
            source.get(name, temporary)
        make_private(temporary)
        if not path.exists():
            sync(temporary)
            publish(temporary, path)
            return
        is_same = name in _HISTORY or file_sha256(path) == file_sha256(temporary)
        temporary.unlink()
    if not is_same:
        fix = "choose a new directory, or resume what is in this one"
        raise CheckpointError("STORE011", f"{path} is there already, with other contents than the mirror's", fix=fix)


class _Destination:
    """A folder of any file system; `names` are its files, listed once and updated by each copy."""

    def __init__(self, url: str, reads_credentials: bool = False) -> None:
        self.url = url
        self.fs, self.root = open_url(url, reads_credentials)
        self.fs.invalidate_cache()
        self.root = self.root.rstrip("/")
        prefix = f"{self.root}/"
        self.names = {str(name).removeprefix(prefix) for name in self.fs.find(self.root)}
        if not self.names:  # `find` takes a folder that can't be read for an empty one; `ls` raises the error.
            with suppress(FileNotFoundError):
                self.fs.ls(self.root)

    def rounds(self, pattern: re.Pattern[str]) -> list[int]:
        """Rounds of the files whose names match, ascending."""
        numbers = set()
        for name in self.names:
            match = pattern.fullmatch(name)
            if match:
                numbers.add(int(match[1]))
        return sorted(numbers)

    def read(self, name: str) -> bytes:
        """Contents of a small file."""
        contents: bytes = self.fs.cat_file(f"{self.root}/{name}")
        return contents

    def put(self, path: Path, name: str) -> None:
        """Upload a file."""
        target = f"{self.root}/{name}"
        self.fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.fs.put_file(str(path), target)
        if not _RECORD.fullmatch(name):
            self.names.add(name)
        if isinstance(self.fs, LocalFileSystem):
            file = Path(target)
            for local_path in (file, *file.parents):
                make_private(local_path)
                if str(local_path) == self.root:
                    break

    def get(self, name: str, path: Path) -> None:
        """Download a file."""
        self.fs.get_file(f"{self.root}/{name}", str(path))

    def remove(self, name: str) -> None:
        """Remove a file or a folder."""
        self.fs.rm(f"{self.root}/{name}", recursive=True)
        folder = f"{name}/"
        self.names = {file for file in self.names if file != name and not file.startswith(folder)}


def _files(path: Path) -> list[Path]:
    """A file, or all files of a folder; empty if neither exists."""
    if path.is_file():
        return [path]
    return [inner for inner in path.rglob("*") if inner.is_file()]


def _size_bytes(paths: Iterable[Path]) -> int:
    """Total size of the existing files, in bytes."""
    return sum(path.stat().st_size for path in paths if path.exists())


@contextmanager
def _reachable(name: str, url: str) -> Iterator[None]:
    """Turn any file system's errors into `TryAgainError`, or into a refusal with its cause; secrets stay hidden."""
    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        address = _without_secrets(name)
        got = line_of(error, url)
        if cause is not None:
            raise error_of_cause(cause, address, got) from error
        raise refusal_of_url(error, url) or _problem(list(chain(error)), address, got) from error


def _problem(links: list[BaseException], name: str, got: str) -> HyphaError:
    """The error to raise for a file of a mirror that can't be read, by an error and its causes."""
    refusal = error_of_refusal(links, name, got)
    if refusal is not None:
        return refusal
    status = status_of(links)
    if any(map(is_unknown_host, links)):
        return CheckpointError("STORE012", f"the host of {name} doesn't exist", got, fix="check the address")
    if status is None or may_pass(links, status):
        return TryAgainError("STORE012", f"{name} can't be read", got, fix="is it reachable?")
    return CheckpointError("STORE012", f"{name} can't be read", got, fix="check the address")


def _without_secrets(url: str) -> str:
    """Return a URL without user and secrets."""
    return re.sub(r"//[^/@]*@", "//", redacted(url))
