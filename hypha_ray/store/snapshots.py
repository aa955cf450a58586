"""Snapshots: a round's weights and outer momentum as safetensors files, under ``checkpoints/`` of a run directory.

    round_000012/model.safetensors     weights θ by name; read by `from_pretrained` and `safetensors.torch.load_file`
                 outer.safetensors     outer momentum, by the same names
                 worker-3.safetensors  inner state of worker 3, in replay mode only
                 state.json            sha256 of all these files, layout of the model, state of the scheduler

A sha256 is that of the file's bytes, as printed by `sha256sum`; the commit record has the first two as well.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.failpoints import failpoint
from hypha_ray.store.disk import make_folder, publish, room_for, sealed, sync, unsealed, write_file
from hypha_ray.store.tensorfile import Array, file_sha256, read, write
from hypha_ray.texts import rounds_text

FORMAT = 1
"""Version of the format; increased when older code can't read it."""

MISSING = "STORE006"
"""Code of the error for a snapshot that doesn't exist."""
_MODEL = "model.safetensors"
_OUTER = "outer.safetensors"
_STATE = "state.json"
_WORKER = "worker-"
_SUFFIX = ".safetensors"
_FOLDER = re.compile(r"round_(\d{6,})")
_HEADERS_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Contents of a snapshot: θ and momentum by tensor name, workers' inner states, and the state saved with them."""

    round: int
    tensors: dict[str, Array]
    outer: dict[str, Array]
    inner: dict[int, dict[str, Array]]
    state: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """Description of a snapshot, not compared with its files."""

    hashes: tuple[str, str]
    """Sha256 of the files of weights and of momentum."""
    state: dict[str, Any]


def write_snapshot(
    directory: Path,
    round: int,
    tensors: Mapping[str, Array],
    outer: Mapping[str, Array],
    inner: Mapping[int, Mapping[str, Array]],
    state: Mapping[str, Any],
) -> tuple[str, str]:
    """Write a snapshot atomically; replaces one of the same round.

    θ and outer momentum are given by name, inner states by worker and name, and `state` in JSON's types.

    Returns:
        Sha256 of the files of weights and of momentum.

    Raises:
        TryAgainError: the disk is full or can't be written; older snapshots are unchanged.

    """
    path = snapshot_path(directory, round)
    parts = {_MODEL: tensors, _OUTER: outer}
    for worker, inner_state in inner.items():
        parts[f"{_WORKER}{worker}{_SUFFIX}"] = inner_state
    need_bytes = _HEADERS_BYTES
    for part in parts.values():
        need_bytes += sum(array.nbytes for array in part.values())
    temporary = path.with_suffix(".tmp")
    try:
        with room_for(path, need_bytes):
            files = _write_parts(temporary, parts)
            record = {"format": FORMAT, "round": round, "sha256": files, "state": dict(state)}
            write_file(temporary / _STATE, sealed(record))
            sync(temporary)
            failpoint("store.before_publish")
            _clear(path)
            publish(temporary, path)
    except TryAgainError:
        _clear(temporary)
        raise
    return files[_MODEL], files[_OUTER]


def load_snapshot(directory: Path, round: int) -> Snapshot:
    """Read a snapshot, and check its hashes.

    Raises:
        CheckpointError: it is missing, damaged, or written by newer code; the error names the newest good one.

    """
    try:
        return read_snapshot(directory, round)
    except CheckpointError as error:
        raise _name_newest_good(error, directory) from error


def require_snapshot(directory: Path, round: int) -> None:
    """Refuse a round without a snapshot, as `load_snapshot` does; the files of one that is there aren't read.

    Raises:
        CheckpointError: it is missing.

    """
    try:
        _require_folder(snapshot_path(directory, round), round)
    except CheckpointError as error:
        raise _name_newest_good(error, directory) from error


def _name_newest_good(error: CheckpointError, directory: Path) -> CheckpointError:
    """Return an error that names the newest good snapshot besides."""
    good = newest_good(directory)
    allowed = error.allowed
    if good is None:
        fix = "start anew, there is no good checkpoint"
    else:
        fix = f"newest good checkpoint: round {good + 1}"
        if error.code == MISSING:
            allowed = f"{rounds_text(rounds(directory))}, which have one"
            fix += "; more are kept by a larger checkpoint.keep"
    return CheckpointError(error.code, f"{error.what}, in {directory}", error.got, allowed, fix)


def read_snapshot(directory: Path, round: int) -> Snapshot:
    """Like `load_snapshot`, but the error doesn't look for another snapshot."""
    path = snapshot_path(directory, round)
    record = _verify_files(path, round)
    try:
        inner = {}
        for name in record["sha256"]:
            if name.startswith(_WORKER):
                worker = int(name.removeprefix(_WORKER).removesuffix(_SUFFIX))
                inner[worker] = read(path / name)
        return Snapshot(round, read(path / _MODEL), read(path / _OUTER), inner, record["state"])
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(round, f"can't be read: {error}") from error


def read_header(directory: Path, round: int) -> SnapshotHeader | None:
    """Read a snapshot's header; None if it is missing or damaged."""
    try:
        record = _read_record(snapshot_path(directory, round), round)
    except CheckpointError:
        return None
    hashes = record["sha256"]
    return SnapshotHeader((hashes[_MODEL], hashes[_OUTER]), record["state"])


def newest_good(directory: Path) -> int | None:
    """Round of the newest undamaged snapshot; None if there is none."""
    for round in reversed(rounds(directory)):
        if is_good(directory, round):
            return round
    return None


def is_good(directory: Path, round: int) -> bool:
    """Whether a round has an undamaged snapshot; its files are read."""
    try:
        _verify_files(snapshot_path(directory, round), round)
    except CheckpointError:
        return False
    return True


def rounds(directory: Path) -> list[int]:
    """Rounds that have a snapshot, oldest first, damaged ones included."""
    numbers = []
    for path in (directory / "checkpoints").glob("round_*"):
        match = _FOLDER.fullmatch(path.name)
        if match:
            numbers.append(int(match[1]))
    return sorted(numbers)


def prune(directory: Path, first: int, spared: Container[int] = ()) -> None:
    """Remove the snapshots of all rounds before `first`, except those of `spared`."""
    for round in rounds(directory):
        if round < first and round not in spared:
            _clear(snapshot_path(directory, round))


def snapshot_path(directory: Path, round: int) -> Path:
    """Folder of a round's snapshot."""
    return directory / "checkpoints" / f"round_{round:06d}"


def _clear(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _write_parts(folder: Path, parts: Mapping[str, Mapping[str, Array]]) -> dict[str, str]:
    """Write each mapping of tensors to a file in a new folder; returns their hashes."""
    _clear(folder)
    make_folder(folder)
    hashes: dict[str, str] = {}
    for name, tensors in parts.items():
        hashes[name] = write(folder / name, tensors)
        if name == _MODEL:
            failpoint("store.after_weights")
    return hashes


def _verify_files(path: Path, round: int) -> dict[str, Any]:
    """Read a snapshot's record, and compare the files with its hashes."""
    record = _read_record(path, round)
    for name, expected in record["sha256"].items():
        try:
            sha256 = file_sha256(path / name)
        except FileNotFoundError:
            raise _damaged(round, f"{name} is missing") from None
        except OSError as error:
            raise _damaged(round, f"{name} can't be read: {error.strerror}") from error
        if sha256 != expected:
            raise _damaged(round, f"{name} has other bytes than were written")
    return record


def _require_folder(path: Path, round: int) -> None:
    if not path.is_dir():
        raise CheckpointError(MISSING, f"there is no checkpoint of round {round + 1}")


def _read_record(path: Path, round: int) -> dict[str, Any]:
    """Read and check ``state.json``."""
    _require_folder(path, round)
    try:
        record = unsealed((path / _STATE).read_bytes())
        newer = record["format"] > FORMAT
        whole = {_MODEL, _OUTER} <= record["sha256"].keys()
    except FileNotFoundError:
        raise _damaged(round, f"{_STATE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(round, f"{_STATE} has other bytes than were written") from error
    if newer:
        problem = f"checkpoint round {round + 1} is newer than this program"
        raise CheckpointError("STORE005", problem, f"format {record['format']}", f"format {FORMAT}")
    if not whole or record["round"] != round:
        raise _damaged(round, f"{_STATE} is that of another one")
    return record


def _damaged(round: int, damage: str) -> CheckpointError:
    line = damage.splitlines()[0]
    return CheckpointError("STORE004", f"checkpoint round {round + 1}: {line}")
