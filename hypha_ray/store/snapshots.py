"""Snapshots: a round's weights and outer momentum as safetensors files, whose bytes depend only on their tensors.

The safetensors library copies all tensors to write them, and guarantees no order. Here equal tensors give equal files,
on every machine. So a sha256 identifies tensors, and can be computed without writing the file.

    round_000012/model.safetensors     weights θ by name; read by `from_pretrained` and `safetensors.torch.load_file`
                 outer.safetensors     outer momentum, by the same names
                 worker-3.safetensors  inner state of worker 3, in replay mode only
                 state.json            sha256 of all these files, layout of the model, state of the scheduler

A sha256 is that of the file's bytes, as printed by `sha256sum`; the commit record has the first two as well.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.failpoints import failpoint
from hypha_ray.store.disk import make_folder, new_file, publish, room_for, sealed, sync, unsealed, write_file
from hypha_ray.texts import rounds_text
from hypha_ray.types import Flat, Layout
from hypha_ray.types.data import dtype_of, is_trained

Array: TypeAlias = npt.NDArray[Any]

_DTYPES = {
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float16": "F16",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Safetensors' names of numpy dtypes, widest first."""
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


def digest(tensors: Mapping[str, Array]) -> str:
    """Sha256 of the file that `write` would write."""
    total = hashlib.sha256()
    for chunk in chunks(tensors):
        total.update(chunk)
    return total.hexdigest()


def write(path: Path, tensors: Mapping[str, Array]) -> str:
    """Write tensors to a file, fsync it, and return the sha256 of its bytes.

    Wide dtypes come before narrow ones, for alignment; otherwise the mapping's order is kept.
    """
    total = hashlib.sha256()
    with new_file(path) as file:
        for chunk in chunks(tensors):
            total.update(chunk)
            file.write(chunk)
    return total.hexdigest()


def read(path: Path) -> dict[str, Array]:
    """Read all tensors of a file."""
    tensors: dict[str, Array] = load_file(path)
    return tensors


def file_sha256(path: Path) -> str:
    """Sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def named(layout: Layout, flats: Sequence[Flat], prefix: str = "") -> dict[str, Array]:
    """Views of the tensors by name; all of the layout, or those of a kind such as ``parameters/``."""
    tensors = {}
    for entry in layout.entries:
        if entry.group.startswith(prefix):
            group = flats[entry.fragment][entry.group]
            tensors[entry.name] = group[entry.offset : entry.offset + entry.size].reshape(entry.shape)
    return tensors


def flattened(layout: Layout, tensors: Mapping[str, Array], prefix: str = "") -> list[Flat]:
    """Copy tensors into new arrays, one for each fragment and group: the reverse of `named`."""
    flats: list[Flat] = []
    for fragment in range(layout.fragments):
        sizes = layout.groups(fragment)
        flats.append({group: np.empty(sizes[group], dtype_of(group)) for group in sizes if group.startswith(prefix)})
    for entry in layout.entries:
        if entry.group.startswith(prefix):
            group = flats[entry.fragment][entry.group]
            group[entry.offset : entry.offset + entry.size] = tensors[entry.name].ravel()
    return flats


def named_outer(layout: Layout, flats: Sequence[Flat]) -> dict[str, Array]:
    """Name outer momentum like the weights; other states get the fragment's number and their own name."""
    if all(flat.keys() == _trained_groups(layout, fragment) for fragment, flat in enumerate(flats)):
        return named(layout, flats, "parameters/")
    tensors = {}
    for fragment, flat in enumerate(flats):
        for name, array in flat.items():
            tensors[f"{fragment}/{name}"] = array
    return tensors


def flattened_outer(layout: Layout, tensors: Mapping[str, Array]) -> list[Flat]:
    """Reverse of `named_outer`."""
    trained_names = {entry.name for entry in layout.entries if is_trained(entry.group)}
    if tensors.keys() == trained_names:
        return flattened(layout, tensors, "parameters/")
    flats: list[Flat] = [{} for _ in range(layout.fragments)]
    for name, array in tensors.items():
        fragment, _, state_name = name.partition("/")
        flats[int(fragment)][state_name] = array
    return flats


def _trained_groups(layout: Layout, fragment: int) -> set[str]:
    return {group for group in layout.groups(fragment) if is_trained(group)}


def chunks(tensors: Mapping[str, Array], notes: Mapping[str, str] | None = None) -> Iterator[memoryview | bytes]:
    """Yield the file's bytes: length of the header and header, with `notes` in it, then the tensors one by one."""
    ranks = list(_DTYPES)
    names = sorted(tensors, key=lambda name: ranks.index(tensors[name].dtype.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(notes or {})}}
    start = 0
    for name in names:
        tensor = tensors[name]
        stop = start + tensor.nbytes
        dtype_code = _DTYPES[tensor.dtype.name]
        header[name] = {"dtype": dtype_code, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = np.ascontiguousarray(tensors[name]).reshape(-1)
        yield flat.view(np.uint8).data


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
    good_round = newest_good(directory)
    allowed = error.allowed
    if good_round is None:
        fix = "start anew, there is no good checkpoint"
    else:
        fix = f"newest good checkpoint: round {good_round + 1}"
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


def prune(directory: Path, first_round: int, spared_rounds: Container[int] = ()) -> None:
    """Remove the snapshots of all rounds before `first_round`, except those of `spared_rounds`."""
    for round in rounds(directory):
        if round < first_round and round not in spared_rounds:
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
    for name, expected_sha256 in record["sha256"].items():
        try:
            sha256 = file_sha256(path / name)
        except FileNotFoundError:
            raise _damaged(round, f"{name} is missing") from None
        except OSError as error:
            raise _damaged(round, f"{name} can't be read: {error.strerror}") from error
        if sha256 != expected_sha256:
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
        is_whole = {_MODEL, _OUTER} <= record["sha256"].keys()
    except FileNotFoundError:
        raise _damaged(round, f"{_STATE} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(round, f"{_STATE} has other bytes than were written") from error
    if newer:
        problem = f"checkpoint round {round + 1} is newer than this program"
        raise CheckpointError("STORE005", problem, f"format {record['format']}", f"format {FORMAT}")
    if not is_whole or record["round"] != round:
        raise _damaged(round, f"{_STATE} is that of another one")
    return record


def _damaged(round: int, damage: str) -> CheckpointError:
    line = damage.splitlines()[0]
    return CheckpointError("STORE004", f"checkpoint round {round + 1}: {line}")
