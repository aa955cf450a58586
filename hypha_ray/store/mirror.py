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

from hypha_ray.errors import CheckpointError, TryAgainError, line_of
from hypha_ray.files import make_private
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.disk import publish, room_for, sync_file
from hypha_ray.store.file_systems import is_s3, open_url
from hypha_ray.store.remote_errors import cause_of, refusal_of_url
from hypha_ray.store.snapshots import snapshot_path
from hypha_ray.store.tensorfile import file_sha256
from hypha_ray.texts import redacted

_STATE = "state.json"
_RECORD = re.compile(r"commits/round_(\d{6,})\.json")
_SNAPSHOT = re.compile(r"checkpoints/round_(\d{6,})/\w[\w.-]*")
_OTHERS = ("config.toml", "dataset.json", "identity.json", "origin.json", "provenance.json", "quarantine.json")
_HISTORY = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl")
"""Files that grow with every round; each copy is a whole one."""
_RESULTS = ("summary.json", "model", "model-best", "plots")
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
        self._place: _Place | None = None
        """The destination with its known files; None: they have to be listed."""
        self._anew = False
        """Whether the destination is to be opened with credentials as they are then."""
        self._first = 0
        """First round whose record isn't at the destination; valid unless `_place` is None."""
        self._history_at = -HISTORY_S

    @property
    def place(self) -> str:
        """The mirror's address without secrets."""
        return _shown(self._url)

    def size(self, round: int | None = None) -> int:
        """Size of a round's snapshot in bytes, or of the run's results; 0 if they can't be read."""
        with suppress(OSError):
            return _bytes(self._results() if round is None else self._snapshot(round))
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
            self._push(self._looked_at(), round, keep)
        except Exception as error:  # Each kind of file system has its own errors.
            why = self._why(error)
            self._place = None
            self._anew = True
            return f"the copy of round {round + 1} to {self.place} failed: {why}; the next one includes it"
        return None

    def _why(self, error: Exception) -> str:
        """Reason of a failure, with its remedy if the destination tells one."""
        place = self._place
        line = line_of(error, self._url)
        cause = cause_of(error, place.fs, f"{place.root}/{_STATE}") if place and is_s3(place.fs) else cause_of(error)
        return line if cause is None else f"{cause.what} ({line}): {cause.fix}"

    def complete(self) -> str | None:
        """Copy a run's results; returns None or a description of the problem."""
        try:
            place = self._looked_at()
            self._copy_small(place, (*_OTHERS, *_HISTORY))
            for path in self._results():
                place.put(path, str(path.relative_to(self._directory)))
        except Exception as error:
            return f"the copy of the run's results to {self.place} failed: {self._why(error)}"
        return None

    def _results(self) -> list[Path]:
        return sorted(path for name in _RESULTS for path in _files(self._directory / name))

    def _snapshot(self, round: int) -> list[Path]:
        """Files of a snapshot; its header comes last, so that it marks a complete copy."""
        files = snapshot_path(self._directory, round).iterdir()
        return sorted(files, key=lambda path: (path.name == _STATE, path.name))

    def _push(self, place: _Place, round: int, keep: int) -> None:
        self._copy_snapshot(place, round)
        self._copy_small(place, _OTHERS)
        small = _bytes([self._directory / name for name in _HISTORY]) <= self.size(round)
        if small or time.monotonic() - self._history_at >= HISTORY_S:
            self._copy_small(place, _HISTORY)
            self._history_at = time.monotonic()
        for missing in range(self._first, round + 1):
            place.put(self._log.path(missing), f"commits/{self._log.path(missing).name}")
        self._first = round + 1
        self._prune(place, round, keep)

    def _copy_small(self, place: _Place, names: Iterable[str]) -> None:
        for name in filter(lambda name: (self._directory / name).exists(), names):
            place.put(self._directory / name, name)

    def _looked_at(self) -> _Place:
        """The destination; its files are listed only if they aren't known."""
        if self._place is None:
            place = _Place(f"{self._url.rstrip('/')}/{self._directory.name}", self._anew)
            self._first = self._first_missing(place)
            place.names = {name for name in place.names if not _RECORD.fullmatch(name)}  # `_first` stands for these.
            self._place = place
        return self._place

    def _first_missing(self, place: _Place) -> int:
        """Remove the mirror's records that differ from the run's, newest first; returns the first missing round."""
        for round in reversed(place.rounds(_RECORD)):
            name = f"commits/{self._log.path(round).name}"
            here = self._log.path(round)
            if here.exists() and place.read(name) == here.read_bytes():
                return round + 1  # Records form a chain of hashes, so all earlier ones are equal, too.
            place.remove(name)
        return 0

    def _copy_snapshot(self, place: _Place, round: int) -> None:
        """Copy a snapshot; removes an old header first."""
        folder = snapshot_path(self._directory, round)
        name = f"checkpoints/{folder.name}"
        if f"{name}/{_STATE}" in place.names:
            place.remove(f"{name}/{_STATE}")
        for path in self._snapshot(round):
            place.put(path, f"{name}/{path.name}")

    def _prune(self, place: _Place, round: int, keep: int) -> None:
        """Remove the mirror's snapshots except the newest `keep`; those of rewound rounds as well."""
        whole = [one for one in place.rounds(re.compile(rf"checkpoints/round_(\d{{6,}})/{_STATE}")) if one < round]
        kept = {round, *(whole[1 - keep :] if keep > 1 else ())}
        for other in set(place.rounds(_SNAPSHOT)) - kept:
            place.remove(f"checkpoints/{snapshot_path(self._directory, other).name}")


def fetch(url: str, directory: Path) -> None:
    """Copy a run from its mirror to a run directory; equal files that are there already stay.

    Args:
        url: the run's folder at the mirror.
        directory: destination; it is created if it is missing.

    Raises:
        CheckpointError: the mirror has no run, or the directory has another one.
        ConfigError: no file system can open the URL.
        TryAgainError: the mirror can't be read, or the disk can't be written.

    """
    with _reachable(url, url):
        place = _Place(url)
    records = [name for name in place.names if _RECORD.fullmatch(name)]
    if not records:
        raise CheckpointError(
            "STORE006", f"there is no run at {_shown(url)}", fix="is it the folder of the run itself?"
        )
    first = [name for name in place.names if name in (*_OTHERS, *_HISTORY) or _SNAPSHOT.fullmatch(name)]
    for folder in (directory, directory / "checkpoints"):
        with room_for(folder / "any", 0):
            make_private(folder)
    for name in [*sorted(first), *sorted(records)]:
        _fetch(place, name, directory / name)


def _fetch(place: _Place, name: str, path: Path) -> None:
    temporary = path.with_name(f"round_{path.name}.tmp")
    with room_for(path, 0):
        with _reachable(name, place.url):
            place.get(name, temporary)
        make_private(temporary)
        if not path.exists():
            sync_file(temporary)
            publish(temporary, path)
            return
        same = name in _HISTORY or file_sha256(path) == file_sha256(temporary)
        temporary.unlink()
    if not same:
        fix = "choose a new directory, or resume what is in this one"
        raise CheckpointError("STORE011", f"{path} is there already, with other contents than the mirror's", fix=fix)


class _Place:
    """A folder of any file system; `names` are its files, listed once and updated by each copy."""

    def __init__(self, url: str, anew: bool = False) -> None:
        self.url = url
        self.fs, self.root = open_url(url, anew)
        self.fs.invalidate_cache()
        self.root = self.root.rstrip("/")
        self.names = {str(name).removeprefix(f"{self.root}/") for name in self.fs.find(self.root)}
        if not self.names:  # `find` takes a place that can't be read for an empty one; `ls` says what is wrong.
            with suppress(FileNotFoundError):
                self.fs.ls(self.root)

    def rounds(self, pattern: re.Pattern[str]) -> list[int]:
        """Rounds of the files whose names match, ascending."""
        return sorted({int(found[1]) for name in self.names if (found := pattern.fullmatch(name))})

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
            for one in (Path(target), *Path(target).parents):
                make_private(one)
                if str(one) == self.root:
                    break

    def get(self, name: str, path: Path) -> None:
        """Download a file."""
        self.fs.get_file(f"{self.root}/{name}", str(path))

    def remove(self, name: str) -> None:
        """Remove a file or a folder."""
        self.fs.rm(f"{self.root}/{name}", recursive=True)
        self.names = {one for one in self.names if one != name and not one.startswith(f"{name}/")}


def _files(path: Path) -> list[Path]:
    """A file, or all files of a folder; empty if neither exists."""
    return [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]


def _bytes(paths: Iterable[Path]) -> int:
    """Total size of the existing files, in bytes."""
    return sum(path.stat().st_size for path in paths if path.exists())


@contextmanager
def _reachable(what: str, url: str) -> Iterator[None]:
    """Turn any file system's errors into `TryAgainError`, or into a refusal of its URL, whose secrets stay hidden."""
    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        got = line_of(error, url)
        if cause is None and (refusal := refusal_of_url(error, url)) is not None:
            raise refusal from error
        what = f"{_shown(what)} can't be read" if cause is None else f"{_shown(what)}: {cause.what}"
        raise TryAgainError("STORE012", what, got, fix="is it reachable?" if cause is None else cause.fix) from error


def _shown(url: str) -> str:
    """A URL without user and secrets."""
    return re.sub(r"//[^/@]*@", "//", redacted(url))
