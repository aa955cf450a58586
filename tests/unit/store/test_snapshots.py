"""Snapshots, in files that the safetensors library reads: whole or absent, and never loaded once damaged."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from safetensors import safe_open
from safetensors.numpy import load_file

from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.store.disk import sealed, sweep
from hypha_ray.store.snapshots import (
    Array,
    digest,
    file_sha256,
    load_snapshot,
    newest_good,
    prune,
    read,
    rounds,
    write,
    write_snapshot,
)

FILES = ["model.safetensors", "outer.safetensors", "state.json", "worker-3.safetensors"]


def write_round(directory: Path, number: int, scale: float = 1.0) -> tuple[str, str]:
    theta = {"a": np.full((2, 3), scale * number, np.float32), "n": np.array(number)}
    outer = {"a": np.full((2, 3), -scale * number, np.float32)}
    inner = {3: {"rng": np.arange(number, dtype=np.uint8)}}
    return write_snapshot(directory, number, theta, outer, inner, {"layout": "abc", "round": number})


def folder(directory: Path, number: int) -> Path:
    return directory / "checkpoints" / f"round_{number:06d}"


def test_snapshot_write_load_gives_tensors_and_state(tmp_path: Path) -> None:
    write_round(tmp_path, 12)
    snapshot = load_snapshot(tmp_path, 12)
    assert snapshot.round == 12 and snapshot.state == {"layout": "abc", "round": 12}
    assert np.array_equal(snapshot.tensors["a"], np.full((2, 3), 12, np.float32))
    assert snapshot.inner.keys() == {3} and np.array_equal(snapshot.inner[3]["rng"], np.arange(12))
    assert snapshot.tensors["n"] == 12 and np.array_equal(snapshot.outer["a"], -snapshot.tensors["a"])


def test_snapshot_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    hashes = write_round(tmp_path, 0)
    names = [name for name in FILES if name != "state.json"]
    found = {name: hashlib.sha256((folder(tmp_path, 0) / name).read_bytes()).hexdigest() for name in names}
    assert hashes == (found["model.safetensors"], found["outer.safetensors"])
    record = json.loads((folder(tmp_path, 0) / "state.json").read_text())
    assert record["sha256"] == found


@pytest.mark.parametrize("name", FILES)
def test_snapshot_any_flipped_bit_is_recognised_and_the_newest_good_named(tmp_path: Path, name: str) -> None:
    write_round(tmp_path, 3)
    write_round(tmp_path, 4)
    path = folder(tmp_path, 4) / name
    data = path.read_bytes()
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="newest good checkpoint: round 4"):
            load_snapshot(tmp_path, 4)
    path.write_bytes(data)
    assert load_snapshot(tmp_path, 4).round == 4


@pytest.mark.parametrize("name", FILES)
def test_snapshot_truncated_or_missing_file_is_recognised(tmp_path: Path, name: str) -> None:
    write_round(tmp_path, 0)
    path = folder(tmp_path, 0) / name
    data = path.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=f"{name} has other bytes than were written.*no good check"):
            load_snapshot(tmp_path, 0)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"checkpoint round 1: {name} is missing, in {tmp_path}"):
        load_snapshot(tmp_path, 0)


def test_snapshot_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_round(tmp_path, 0)
    state = folder(tmp_path, 0) / "state.json"
    record = {key: value for key, value in json.loads(state.read_text()).items() if key != "checksum"}
    state.write_bytes(sealed({**record, "format": 99}))
    with pytest.raises(CheckpointError, match="got format 99, allowed format 1"):
        load_snapshot(tmp_path, 0)


def test_snapshot_unknown_round_names_the_newest_good(tmp_path: Path) -> None:
    write_round(tmp_path, 41)
    with pytest.raises(CheckpointError, match="newest good checkpoint: round 42"):
        load_snapshot(tmp_path, 42)


def test_snapshot_of_the_same_round_is_replaced(tmp_path: Path) -> None:
    write_round(tmp_path, 2)
    hashes = write_round(tmp_path, 2, scale=5)
    assert load_snapshot(tmp_path, 2).tensors["a"][0, 0] == 10
    assert hashes != write_round(tmp_path / "other", 2)


def test_prune_removes_the_rounds_before_and_nothing_of_others(tmp_path: Path) -> None:
    for number in range(5):
        write_round(tmp_path, number)
    foreign = tmp_path / "checkpoints" / "mine"
    foreign.mkdir()
    prune(tmp_path, 3)
    assert rounds(tmp_path) == [3, 4] and foreign.exists()


def test_sweep_clears_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    write_round(tmp_path, 0)
    leftover = folder(tmp_path, 1).with_suffix(".tmp")
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoints" / "round_000002.tmp").write_bytes(b"half")
    sweep(tmp_path / "checkpoints")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round_000000"]
    assert newest_good(tmp_path) == 0


def test_snapshot_half_written_folder_is_none_and_is_replaced(tmp_path: Path) -> None:
    write_round(tmp_path, 0)
    leftover = folder(tmp_path, 1).with_suffix(".tmp")
    leftover.mkdir()
    (leftover / "old").write_bytes(b"")
    assert newest_good(tmp_path) == 0
    write_round(tmp_path, 1)
    assert sorted(path.name for path in folder(tmp_path, 1).iterdir()) == FILES


def test_snapshot_larger_than_the_disk_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    write_round(tmp_path, 0)
    huge = {"a": np.broadcast_to(np.float32(0), (1 << 50,))}
    with pytest.raises(TryAgainError, match=r"round_000001.*free space.*4503599628\.4 MB") as caught:
        write_snapshot(tmp_path, 1, huge, {}, {}, {})
    assert caught.value.exit_code == 75
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round_000000"]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_snapshot_that_fails_in_mid_write_leaves_the_earlier_ones_alone(tmp_path: Path) -> None:
    write_round(tmp_path, 0)
    theta = {"a": np.zeros(100_000, np.float32)}
    with files_up_to(200_000), pytest.raises(TryAgainError, match="round_000001 can't be written: File too large"):
        write_snapshot(tmp_path, 1, theta, {}, {}, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["round_000000"]
    assert load_snapshot(tmp_path, 0).round == 0
    write_snapshot(tmp_path, 1, theta, {}, {}, {})
    assert newest_good(tmp_path) == 1


def tensors() -> dict[str, Array]:
    return {
        "flags": np.array([1, 0, 1], np.uint8),
        "größe": np.array([[1.5, -0.0, np.nan]], np.float32),
        "mask": np.array([True, False]),
        "count": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "wide": np.linspace(0, 1, 5),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4).T,
    }


def test_write_every_dtype_is_read_back_by_the_library_bit_for_bit(tmp_path: Path) -> None:
    write(tmp_path / "t.safetensors", tensors())
    loaded = load_file(tmp_path / "t.safetensors")
    assert set(loaded) == set(tensors())
    for name, tensor in tensors().items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert loaded[name].tobytes() == tensor.tobytes()


def test_write_file_is_one_that_torch_and_transformers_accept(tmp_path: Path) -> None:
    write(tmp_path / "t.safetensors", tensors())
    assert safetensors.torch.load_file(tmp_path / "t.safetensors")["count"].item() == 7
    with safe_open(tmp_path / "t.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_write_returns_what_sha256sum_prints_and_digest_knows_it_beforehand(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    expected = digest(tensors())
    assert write(path, tensors()) == expected == file_sha256(path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == expected


@pytest.mark.parametrize("name", ["flags", "count", "wide"])
def test_digest_changes_with_every_tensor(name: str) -> None:
    changed = tensors()
    changed[name] = changed[name] + changed[name].dtype.type(1)
    assert digest(changed) != digest(tensors())


def test_digest_of_renamed_or_reshaped_tensor_differs() -> None:
    renamed, reshaped = tensors(), tensors()
    renamed["Flags"] = renamed.pop("flags")
    reshaped["flags"] = reshaped["flags"].reshape(3, 1)
    assert len({digest(tensors()), digest(renamed), digest(reshaped)}) == 3


def test_write_aligns_every_tensor_to_its_items(tmp_path: Path) -> None:
    write(tmp_path / "t.safetensors", tensors())
    data = (tmp_path / "t.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    for name, tensor in tensors().items():
        assert header[name]["data_offsets"][0] % tensor.itemsize == 0


def test_read_gives_all_tensors(tmp_path: Path) -> None:
    write(tmp_path / "t.safetensors", tensors())
    assert read(tmp_path / "t.safetensors").keys() == tensors().keys()
