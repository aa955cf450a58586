"""Snapshots: a round's weights and outer momentum as safetensors files, under ``checkpoints/`` of a run directory.

    round_000012/model.safetensors   weights θ by name; what `from_pretrained` and `safetensors.torch.load_file` read
                 outer.safetensors   outer momentum, by the same names
                 state.json          sha256 of both files, and what else belongs to the round

A file's sha256 is that of its bytes, as `sha256sum` prints it; the commit record has the same.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hypha_ray.errors import CheckpointError
from hypha_ray.store.disk import publish, room_for, sealed, sync_folder, unsealed, write_file
from hypha_ray.store.tensorfile import Array, file_sha256, read, write

FORMAT = 1
"""Version of the files; grows when older code can't read them."""

_MODEL, _OUTER, _STATE = "model.safetensors", "outer.safetensors", "state.json"
_HEADERS_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot holds: θ and momentum by tensor name, and the state that was saved with them."""

    round: int
    tensors: dict[str, Array]
    outer: dict[str, Array]
    state: dict[str, Any]


def write_snapshot(
    directory: Path, round: int, tensors: Mapping[str, Array], outer: Mapping[str, Array], state: Mapping[str, Any]
) -> tuple[str, str]:
    """Write a snapshot; it appears whole or not at all, and replaces one of the same round.

    Args:
        directory: the run directory.
        round: the round after which θ has these values.
        tensors: θ by name.
        outer: outer momentum by name.
        state: whatever else belongs to the round, as JSON has it.

    Returns:
        Sha256 of the weights' file and of the momentum's.

    Raises:
        TryAgainError: the disk is full or can't be written; older snapshots are as they were.

    """
    path = _path(directory, round)
    need_bytes = sum(array.nbytes for array in (*tensors.values(), *outer.values())) + _HEADERS_BYTES
    temporary = path.with_suffix(".tmp")
    try:
        with room_for(path, need_bytes):
            _clear(temporary)
            temporary.mkdir()
            hashes = write(temporary / _MODEL, tensors), write(temporary / _OUTER, outer)
            files = dict(zip((_MODEL, _OUTER), hashes, strict=True))
            record = {"format": FORMAT, "round": round, "sha256": files, "state": dict(state)}
            write_file(temporary / _STATE, sealed(record))
            sync_folder(temporary)
            _clear(path)
            publish(temporary, path)
    finally:
        _clear(temporary)
    return hashes


def load_snapshot(directory: Path, round: int) -> Snapshot:
    """Read a snapshot whose files are as they were written.

    Raises:
        CheckpointError: it isn't there, is damaged, or was written by newer code; the error names the newest good one.

    """
    try:
        return _load(_path(directory, round))
    except CheckpointError as error:
        good = newest_good(directory)
        fix = "start anew, there is no good checkpoint" if good is None else f"newest good checkpoint: round {good}"
        raise CheckpointError(error.code, error.what, error.got, error.allowed, fix) from error


def newest_snapshot(directory: Path) -> Snapshot:
    """Read the newest snapshot.

    Raises:
        CheckpointError: there is none, or it can't be used.

    """
    found = rounds(directory)
    if not found:
        raise CheckpointError("STORE006", f"there is no checkpoint in {directory}", fix="start anew")
    return load_snapshot(directory, found[-1])


def newest_good(directory: Path) -> int | None:
    """Return the round of the newest snapshot that can be loaded; None: there is none."""
    for round in reversed(rounds(directory)):
        try:
            _verified(_path(directory, round))
        except CheckpointError:
            continue
        return round
    return None


def rounds(directory: Path) -> list[int]:
    """Rounds that have a snapshot, oldest first, damaged ones included."""
    names = (re.fullmatch(r"round_(\d{6,})", path.name) for path in (directory / "checkpoints").glob("round_*"))
    return sorted(int(name[1]) for name in names if name)


def prune(directory: Path, keep: int) -> None:
    """Remove all snapshots but the newest `keep`, and what a crash left unfinished."""
    for round in rounds(directory)[:-keep]:
        _clear(_path(directory, round))
    for leftover in (directory / "checkpoints").glob("round_*.tmp"):
        _clear(leftover)


def _path(directory: Path, round: int) -> Path:
    return directory / "checkpoints" / f"round_{round:06d}"


def _clear(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _load(path: Path) -> Snapshot:
    record = _verified(path)
    try:
        return Snapshot(record["round"], read(path / _MODEL), read(path / _OUTER), record["state"])
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error


def _verified(path: Path) -> dict[str, Any]:
    """Return a snapshot's record, once its files are known to be those that it names."""
    try:
        record = unsealed((path / _STATE).read_bytes())
        if record["format"] > FORMAT:
            raise CheckpointError(
                "STORE005",
                f"checkpoint {path} is newer than this program",
                f"format {record['format']}",
                f"format {FORMAT}",
            )
        for name, expected in record["sha256"].items():
            if file_sha256(path / name) != expected:
                raise _damaged(path / name, "other bytes than were written")
    except FileNotFoundError as error:
        raise CheckpointError("STORE006", f"there is no checkpoint at {error.filename}") from error
    except (OSError, ValueError) as error:
        raise _damaged(path / _STATE, str(error)) from error
    return record


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError("STORE004", f"checkpoint file {path} is damaged", got=how.splitlines()[0])
