"""Safetensors files: readable by the library, and the same bytes for the same tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
from safetensors import safe_open
from safetensors.numpy import load_file

from hypha_ray.store.snapshots import Array, digest, file_sha256, read, write


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
