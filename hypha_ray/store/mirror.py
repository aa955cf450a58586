"""Copies of a run elsewhere: every commit record and the newest snapshots, in any place that fsspec can write to.

    <mirror>/<run>/config.toml, dataset.json, commits/round_000012.json, checkpoints/round_000012/…

What a record needs is there before the record is, so a copy that was interrupted is a shorter run, but a sound one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.modes import make_private
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.disk import publish, room_for, sync_file
from hypha_ray.store.snapshots import snapshot_path
from hypha_ray.store.tensorfile import file_sha256

_STATE = "state.json"
_RECORD = re.compile(r"commits/round_(\d{6,})\.json")
_SNAPSHOT = re.compile(r"checkpoints/round_(\d{6,})/\w[\w.-]*")
_OTHERS = ("config.toml", "dataset.json", "origin.json", "quarantine.json")


class Mirror:
    """Copies a run to another place.

    Args:
        url: folder or fsspec URL; the run gets a folder of its own there, with its name.
        directory: the run directory.

    """

    def __init__(self, url: str, directory: Path) -> None:
        self._url, self._directory, self._log = url, directory, CommitLog(directory)

    def push(self, round: int, keep: int) -> str | None:
        """Copy the newest commit, whose snapshot is there, and whatever records the mirror lacks.

        Args:
            round: number of the newest commit.
            keep: newest snapshots that stay there.

        Returns:
            None; or if it failed, what happened and what becomes of it. It may be tried again with any later round.

        """
        try:
            place = _Place(f"{self._url.rstrip('/')}/{self._directory.name}")
            first = self._first_missing(place)
            self._copy_snapshot(place, round)
            for name in filter(lambda name: (self._directory / name).exists(), _OTHERS):
                place.put(self._directory / name, name)
            for missing in range(first, round + 1):
                place.put(self._log.path(missing), f"commits/{self._log.path(missing).name}")
            self._prune(place, round, keep)
        except Exception as error:  # Each kind of file system has errors of its own.
            shown = _shown(self._url)
            return f"the copy of round {round} to {shown} failed: {_line(error)}; the next one includes it"
        return None

    def _first_missing(self, place: _Place) -> int:
        """Remove the records there that aren't those here, newest first; returns the number of the next one."""
        for round in reversed(place.rounds(_RECORD)):
            name, here = f"commits/{self._log.path(round).name}", self._log.path(round)
            if here.exists() and place.read(name) == here.read_bytes():
                return round + 1  # Each names the weights of the one before, so all before are alike, too.
            place.remove(name)
        return 0

    def _copy_snapshot(self, place: _Place, round: int) -> None:
        """Copy a snapshot, its own record last: by that it is known to be whole."""
        folder = snapshot_path(self._directory, round)
        name = f"checkpoints/{folder.name}"
        if f"{name}/{_STATE}" in place.names:
            place.remove(f"{name}/{_STATE}")
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == _STATE, path.name)):
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
    with _reachable(url):
        place = _Place(url)
    records = [name for name in place.names if _RECORD.fullmatch(name)]
    if not records:
        raise CheckpointError(
            "STORE006", f"there is no run at {_shown(url)}", fix="is it the folder of the run itself?"
        )
    first = [name for name in place.names if name in _OTHERS or _SNAPSHOT.fullmatch(name)]
    for folder in (directory, directory / "checkpoints"):
        with room_for(folder / "any", 0):
            make_private(folder)
    for name in [*sorted(first), *sorted(records)]:
        _fetch(place, name, directory / name)


def _fetch(place: _Place, name: str, path: Path) -> None:
    temporary = path.with_name(f"round_{path.name}.tmp")
    with room_for(path, 0):
        with _reachable(name):
            place.get(name, temporary)
        make_private(temporary)
        if not path.exists():
            sync_file(temporary)
            publish(temporary, path)
            return
        same = file_sha256(path) == file_sha256(temporary)
        temporary.unlink()
    if not same:
        fix = "choose a new directory, or resume what is in this one"
        raise CheckpointError("STORE011", f"{path} is there already, with other contents than the mirror's", fix=fix)


class _Place:
    """A folder of any file system; `names` are the files that were there when it was opened."""

    def __init__(self, url: str) -> None:
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


@contextmanager
def _reachable(what: str) -> Iterator[None]:
    """Turn whatever a file system of any kind raises into an error of ours."""
    try:
        yield
    except Exception as error:
        raise TryAgainError(
            "STORE012", f"{_shown(what)} can't be read", got=_line(error), fix="is it reachable?"
        ) from error


def _shown(url: str) -> str:
    """A URL without user and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
