"""Copies of a run elsewhere: every commit record and the newest snapshots, in any place that fsspec can write to.

    <mirror>/<run>/config.toml, dataset.json, commits/round_000012.json, checkpoints/round_000012/…
                   metrics.jsonl, events.jsonl: with each snapshot, once a minute where they are larger than one
                   summary.json, model/…: at the end

What a record needs is there before the record is, so a copy that was interrupted is a shorter run, but a sound one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hypha_ray.errors import CheckpointError, TryAgainError, first_line
from hypha_ray.modes import make_private
from hypha_ray.redaction import HIDDEN, redacted, secrets_of
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.disk import publish, room_for, sync_file
from hypha_ray.store.snapshots import snapshot_path
from hypha_ray.store.tensorfile import file_sha256

_STATE = "state.json"
_RECORD = re.compile(r"commits/round_(\d{6,})\.json")
_SNAPSHOT = re.compile(r"checkpoints/round_(\d{6,})/\w[\w.-]*")
_OTHERS = ("config.toml", "dataset.json", "origin.json", "quarantine.json")
_HISTORY = ("metrics.jsonl", "events.jsonl")
"""Files that grow with every round, and are copied whole."""
_RESULTS = ("summary.json", "model", "plots")
HISTORY_S = 60.0
"""Seconds between two copies of what grows, once it is larger than a snapshot."""


class Mirror:
    """Copies a run to another place.

    Args:
        url: folder or fsspec URL; the run gets a folder of its own there, with its name.
        directory: the run directory.

    """

    def __init__(self, url: str, directory: Path) -> None:
        self._url, self._directory, self._log = url, directory, CommitLog(directory)
        self._place: _Place | None = None
        """State as it was left; None: it has to be looked up."""
        self._first = 0
        """First round whose record isn't there, while there is such a place."""
        self._history_at = -HISTORY_S

    @property
    def place(self) -> str:
        """The mirror's address, to be shown."""
        return _shown(self._url)

    def size(self, round: int | None = None) -> int:
        """Bytes of a round's snapshot, or of the run's results; 0: they can't be read."""
        with suppress(OSError):
            return _bytes(self._results() if round is None else self._snapshot(round))
        return 0

    def push(self, round: int, keep: int) -> str | None:
        """Copy the newest commit, whose snapshot is there, and whatever records the mirror lacks.

        Args:
            round: number of the newest commit.
            keep: newest snapshots that stay there.

        Returns:
            None; or if it failed, what happened and what becomes of it. It may be tried again with any later round.

        """
        try:
            self._push(self._looked_at(), round, keep)
        except Exception as error:  # Each kind of file system has errors of its own.
            self._place = None
            why = _line(error, self._url)
            return f"the copy of round {round} to {self.place} failed: {why}; the next one includes it"
        return None

    def complete(self) -> str | None:
        """Copy what there is at the end of a run beside commits; returns what `push` does."""
        try:
            place = self._looked_at()
            self._copy_small(place, (*_OTHERS, *_HISTORY))
            for path in self._results():
                place.put(path, str(path.relative_to(self._directory)))
        except Exception as error:
            return f"the copy of the run's results to {self.place} failed: {_line(error, self._url)}"
        return None

    def _results(self) -> list[Path]:
        return sorted(path for name in _RESULTS for path in _files(self._directory / name))

    def _snapshot(self, round: int) -> list[Path]:
        """Files of a snapshot, its own record last: by that it is known to be whole."""
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
        """The place, of which all files are listed only where it isn't known what is there."""
        if self._place is None:
            place = _Place(f"{self._url.rstrip('/')}/{self._directory.name}")
            self._first = self._first_missing(place)
            place.names = {name for name in place.names if not _RECORD.fullmatch(name)}  # Counted from here on.
            self._place = place
        return self._place

    def _first_missing(self, place: _Place) -> int:
        """Remove the records there that aren't those here, newest first; returns the number of the next one."""
        for round in reversed(place.rounds(_RECORD)):
            name, here = f"commits/{self._log.path(round).name}", self._log.path(round)
            if here.exists() and place.read(name) == here.read_bytes():
                return round + 1  # Each names the weights of the one before, so all before are alike, too.
            place.remove(name)
        return 0

    def _copy_snapshot(self, place: _Place, round: int) -> None:
        """Copy a snapshot."""
        folder = snapshot_path(self._directory, round)
        name = f"checkpoints/{folder.name}"
        if f"{name}/{_STATE}" in place.names:
            place.remove(f"{name}/{_STATE}")
        for path in self._snapshot(round):
            place.put(path, f"{name}/{path.name}")

    def _prune(self, place: _Place, round: int, keep: int) -> None:
        """Remove snapshots there that are older than the newest `keep`, or of rounds that were taken back."""
        whole = [one for one in place.rounds(re.compile(rf"checkpoints/round_(\d{{6,}})/{_STATE}")) if one < round]
        kept = {round, *(whole[1 - keep :] if keep > 1 else ())}
        for other in set(place.rounds(_SNAPSHOT)) - kept:
            place.remove(f"checkpoints/{snapshot_path(self._directory, other).name}")


def fetch(url: str, directory: Path) -> None:
    """Copy a run from its mirror to a run directory, as `Mirror` left it; files that are there and alike stay.

    Args:
        url: the run's folder at the mirror.
        directory: where to; it is made if need be.

    Raises:
        CheckpointError: there is no run, or the directory has another one.
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
    """A folder of any file system; `names` are the files that were there when it was opened, and what came since."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._fs.invalidate_cache()
        self._root = self._root.rstrip("/")
        self.names = {str(name).removeprefix(f"{self._root}/") for name in self._fs.find(self._root)}

    def rounds(self, pattern: re.Pattern[str]) -> list[int]:
        """Rounds of the files whose names fit, ascending."""
        return sorted({int(found[1]) for name in self.names if (found := pattern.fullmatch(name))})

    def read(self, name: str) -> bytes:
        """A small file's contents."""
        contents: bytes = self._fs.cat_file(f"{self._root}/{name}")
        return contents

    def put(self, path: Path, name: str) -> None:
        """Copy a file there."""
        target = f"{self._root}/{name}"
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)
        if not _RECORD.fullmatch(name):
            self.names.add(name)
        if isinstance(self._fs, LocalFileSystem):
            for one in (Path(target), *Path(target).parents):
                make_private(one)
                if str(one) == self._root:
                    break

    def get(self, name: str, path: Path) -> None:
        """Copy a file here."""
        self._fs.get_file(f"{self._root}/{name}", str(path))

    def remove(self, name: str) -> None:
        """Remove a file or a folder."""
        self._fs.rm(f"{self._root}/{name}", recursive=True)
        self.names = {one for one in self.names if one != name and not one.startswith(f"{name}/")}


def _files(path: Path) -> list[Path]:
    """A file, or those of a folder; none, if there is nothing."""
    return [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]


def _bytes(paths: Iterable[Path]) -> int:
    """Size of the files that are there."""
    return sum(path.stat().st_size for path in paths if path.exists())


@contextmanager
def _reachable(what: str, url: str) -> Iterator[None]:
    """Turn whatever a file system of any kind raises into an error of ours, without the secrets of its URL."""
    try:
        yield
    except Exception as error:
        raise TryAgainError(
            "STORE012", f"{_shown(what)} can't be read", got=_line(error, url), fix="is it reachable?"
        ) from error


def _shown(url: str) -> str:
    """A URL without user and secrets."""
    return re.sub(r"//[^/@]*@", "//", redacted(url))


def _line(error: Exception, url: str) -> str:
    """One line of an error, which may repeat the URL, or a part of it."""
    text = redacted(first_line(error))
    for secret in secrets_of(url):
        text = text.replace(secret, HIDDEN)
    return f"{type(error).__name__}: {text}"
