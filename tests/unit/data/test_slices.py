"""Slices: what is written is read back, and nothing else than that is."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash

from hypha_ray.data.catalogue import load
from hypha_ray.data.manifest import Manifest, TensorInfo
from hypha_ray.data.slices import Arrays, SliceChecker, describe, read_slice, read_slice_file, write_slice
from hypha_ray.errors import DataError
from hypha_ray.types import SliceInfo

SEQ_LEN = 8
SAMPLES = 5


def sequences(low: int = 0, high: int = 100) -> Arrays:
    ids = np.random.default_rng(0).integers(low, high, (SAMPLES, SEQ_LEN), dtype=np.int64)
    ids.flat[:2] = low, high - 1
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def container(header: Any, content: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + content


def tensor(shape: list[int], start: int, stop: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def zipped() -> bytes:
    file = io.BytesIO()
    torch.save({"input_ids": torch.ones(2, 2)}, file)
    return file.getvalue()


@pytest.fixture
def dataset(tmp_path: Path) -> tuple[Path, SliceInfo, Manifest]:
    arrays = sequences()
    info = write_slice(tmp_path, 17, "train", arrays)
    manifest = Manifest(name="d", modality="language", slices=(info,), tensors=describe(arrays, "")[1])
    manifest.save(tmp_path)
    return tmp_path, info, manifest


def replaced(info: SliceInfo, path: Path, data: bytes, samples: int = SAMPLES) -> SliceInfo:
    """Put other bytes in the slice's place, and let the manifest agree."""
    path.write_bytes(data)
    sha256, xxh3 = hashes(data)
    return SliceInfo(info.index, info.file, sha256, samples, info.split, xxh3)


def hashes(data: bytes) -> tuple[str, str]:
    """The sha256, and the XXH3 that is seeded by it."""
    sha256 = hashlib.sha256(data).hexdigest()
    return sha256, xxhash.xxh128(data, xxhash.xxh3_64(sha256.encode()).intdigest()).hexdigest()


def test_slice_written_and_read_is_the_same_to_the_bit(dataset: tuple[Path, SliceInfo, Manifest]) -> None:
    folder, info, manifest = dataset
    found = read_slice(folder, info, manifest)
    for name, array in sequences().items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
    assert info == SliceInfo(17, "slice-00017.safetensors", info.sha256, SAMPLES, "train", info.xxh3)
    data = (folder / info.file).read_bytes()
    assert hashes(data) == (info.sha256, info.xxh3)


def test_slice_of_a_transposed_view_is_written_in_its_own_order(tmp_path: Path) -> None:
    view = np.arange(12, dtype=np.int32).reshape(3, 4).T
    info = write_slice(tmp_path, 0, "train", {"input_ids": view})
    found = safetensors.numpy.load((tmp_path / info.file).read_bytes())
    np.testing.assert_array_equal(found["input_ids"], view)


@pytest.mark.parametrize("position", [0, 9, 300, -1])
def test_slice_with_one_flipped_bit_is_refused(dataset: tuple[Path, SliceInfo, Manifest], position: int) -> None:
    folder, info, manifest = dataset
    data = bytearray((folder / info.file).read_bytes())
    data[position] ^= 1
    (folder / info.file).write_bytes(data)
    with pytest.raises(DataError, match=r"slice 17 \(slice-00017\.safetensors\)"):
        read_slice(folder, info, manifest)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("release", ["this", "older"])
def test_slice_read_again_is_the_same_and_refused_once_a_bit_has_flipped(
    dataset: tuple[Path, SliceInfo, Manifest], near: bool, release: str
) -> None:
    folder, info, manifest = dataset
    info = info if release == "this" else replace(info, xxh3=None)
    data, checker = (folder / info.file).read_bytes(), SliceChecker(near)
    for _ in range(3):
        for position in (400, len(data) // 2, -1):
            damaged = bytearray(data)
            damaged[position] ^= 1
            with pytest.raises(DataError, match=r"DATA016.*slice 17 .*sha256"):
                checker.decode(bytes(damaged), info, manifest)
        found = checker.decode(data, info, manifest)
        assert found.keys() == sequences().keys()
        assert all(np.array_equal(found[name], array) for name, array in sequences().items())


@pytest.mark.parametrize("near", [True, False])
def test_a_manifest_with_another_sha256_is_not_believed_though_it_has_the_fast_hash(
    dataset: tuple[Path, SliceInfo, Manifest], near: bool
) -> None:
    folder, info, manifest = dataset
    forged = replace(info, sha256=f"{info.sha256[:-1]}{'1' if info.sha256[-1] == '0' else '0'}")
    with pytest.raises(DataError, match="DATA016"):
        SliceChecker(near).decode((folder / info.file).read_bytes(), forged, manifest)


@pytest.mark.parametrize("near", [True, False])
def test_only_a_slice_from_afar_takes_the_time_of_its_sha256(
    dataset: tuple[Path, SliceInfo, Manifest], near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, info, manifest = dataset
    hashed: list[int] = []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: hashed.append(len(data)) or sha256(data))
    checker, data = SliceChecker(near), (folder / info.file).read_bytes()
    for _ in range(2):
        np.testing.assert_array_equal(checker.decode(data, info, manifest)["input_ids"], sequences()["input_ids"])
    assert hashed == ([] if near else [len(data)])


def test_slice_with_another_checksum_says_both_and_what_to_do(dataset: tuple[Path, SliceInfo, Manifest]) -> None:
    folder, info, manifest = dataset
    data = safetensors.numpy.save({name: array + 1 for name, array in sequences().items()})
    (folder / info.file).write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_slice(folder, info, manifest)
    error = caught.value
    assert (error.code, error.allowed, error.got) == ("DATA016", info.sha256, hashlib.sha256(data).hexdigest())
    assert "prepare" in error.fix


def test_slice_that_is_gone_is_refused(dataset: tuple[Path, SliceInfo, Manifest]) -> None:
    folder, info, manifest = dataset
    (folder / info.file).unlink()
    with pytest.raises(DataError, match=r"DATA010.*slice 17.*No such file"):
        read_slice(folder, info, manifest)


WHOLE = safetensors.numpy.save(sequences())
EMPTY = json.dumps(tensor([0], 0, 0, "F32"))
BOMB = "{" + ", ".join(f'"tensor_{number}": {EMPTY}' for number in range(100_000)) + "}"
FOREIGN: list[tuple[str, bytes, str, str]] = [
    ("empty", b"", "DATA012", "0 bytes"),
    ("seven bytes", WHOLE[:7], "DATA012", "7 bytes"),
    ("cut in the header", WHOLE[:40], "DATA012", "cut off"),
    ("cut in the content", WHOLE[:-1], "DATA014", "don't fit"),
    ("longer than its header says", WHOLE + b"\0", "DATA014", "don't fit"),
    ("header of 100 MB", container({}, length=100_000_001), "DATA013", "too long"),
    ("header bomb", container(BOMB.encode()), "DATA013", "too long"),
    ("header that is no JSON", container(b"{input_ids}"), "DATA014", "JSON"),
    ("header that is no object", container(b"[1, 2]"), "DATA011", "safetensors"),
    ("overlap", container({"a": tensor([2], 0, 2), "b": tensor([2], 1, 3)}, b"123"), "DATA014", "don't fit"),
    ("hole", container({"a": tensor([1], 0, 1), "b": tensor([1], 2, 3)}, b"123"), "DATA014", "don't fit"),
    ("reversed", container({"a": tensor([2], 2, 0)}, b"12"), "DATA014", "don't fit"),
    ("shape larger than its bytes", container({"a": tensor([9], 0, 2)}, b"12"), "DATA014", "don't fit"),
    ("unknown dtype", container({"a": tensor([2], 0, 4, "BF16")}, b"1234"), "DATA019", "BF16"),
    ("complex numbers", container({"a": tensor([1], 0, 8, "C64")}, b"12345678"), "DATA019", "complex64"),
    ("no tensors", container({}), "DATA017", "no tensors"),
    ("only metadata", container({"__metadata__": {"a": "b"}}), "DATA017", "no tensors"),
    ("scalar", container({"a": tensor([], 0, 1)}, b"1"), "DATA018", "number of samples"),
    ("no samples", container({"a": tensor([0, 4], 0, 0)}), "DATA018", "number of samples"),
    ("empty samples", container({"a": tensor([4, 0], 0, 0)}), "DATA018", "empty"),
    ("ragged", safetensors.numpy.save({"a": np.ones(3), "b": np.ones((2, 3))}), "DATA018", r"a \[3\], b \[2, 3\]"),
    ("bool of 2", container({"a": tensor([2], 0, 2, "BOOL")}, b"\1\2"), "DATA020", "0 … |1 … 2"),
    ("NaN", safetensors.numpy.save({"images": np.array([[1.0, np.nan]])}), "DATA021", "NaN"),
    ("infinity", safetensors.numpy.save({"images": np.array([[-np.inf, 1.0]], np.float16)}), "DATA021", "finite"),
    ("ids as floats", safetensors.numpy.save({"input_ids": np.ones((2, 3), np.float32)}), "DATA019", "float32"),
    ("ids of one dimension", safetensors.numpy.save({"input_ids": np.ones(3, np.int64)}), "DATA019", "N, seq_len"),
    ("negative ids", safetensors.numpy.save(sequences(low=-1)), "DATA020", "-1 … 99"),
    ("Git LFS pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "DATA011", "git lfs pull"),
    ("pickle", pickle.dumps({"input_ids": [1, 2, 3]}), "DATA011", "pickle"),
    ("zip", zipped(), "DATA011", "zip"),
    ("web page", b"<!DOCTYPE html><html></html>", "DATA011", "web page"),
    ("text", b"once upon a time", "DATA011", "another format"),
]


@pytest.mark.parametrize(("data", "code", "words"), [case[1:] for case in FOREIGN], ids=[case[0] for case in FOREIGN])
@pytest.mark.parametrize("listed", [True, False], ids=["listed", "bare"])
def test_slice_that_is_none_is_refused_with_its_reason(
    dataset: tuple[Path, SliceInfo, Manifest], data: bytes, code: str, words: str, listed: bool
) -> None:
    folder, info, manifest = dataset
    info = replaced(info, folder / info.file, data)
    with pytest.raises(DataError) as caught:
        if listed:
            read_slice(folder, info, manifest)
        else:
            (folder / "manifest.json").unlink()
            load(folder)
    assert caught.value.code == code
    assert "slice-00017.safetensors" in caught.value.what
    assert re.search(words, str(caught.value))


OTHERS: list[tuple[str, Arrays, int, str, str]] = [
    ("id beyond the bounds", sequences(high=102), SAMPLES, "DATA020", "0 … 101, allowed 0 … 99"),
    ("another dtype", {k: a.astype(np.int32) for k, a in sequences().items()}, SAMPLES, "DATA017", "int32"),
    ("longer sequences", {k: np.ones((SAMPLES, 9), np.int64) for k in sequences()}, SAMPLES, "DATA017", "9"),
    ("a tensor less", {"input_ids": sequences()["input_ids"]}, SAMPLES, "DATA017", "attention_mask"),
    ("a tensor more", {**sequences(), "labels": np.ones(SAMPLES, np.int64)}, SAMPLES, "DATA017", "labels"),
    ("samples missing", {k: a[:-1] for k, a in sequences().items()}, SAMPLES, "DATA018", "got 4, allowed 5"),
]


@pytest.mark.parametrize(
    ("arrays", "samples", "code", "words"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS]
)
def test_slice_that_differs_from_the_manifest_is_refused(
    dataset: tuple[Path, SliceInfo, Manifest], arrays: Arrays, samples: int, code: str, words: str
) -> None:
    folder, info, manifest = dataset
    info = replaced(info, folder / info.file, safetensors.numpy.save(arrays), samples)
    with pytest.raises(DataError, match=rf"{code}.*slice 17 .*{words}"):
        read_slice(folder, info, manifest)


SAME_HEADER = ("negative ids", "id beyond the bounds")


@pytest.mark.parametrize(
    ("data", "samples", "code"),
    [
        *((data, SAMPLES, code) for name, data, code, _ in FOREIGN if name not in SAME_HEADER),
        *(
            (safetensors.numpy.save(arrays), samples, code)
            for name, arrays, samples, code, _ in OTHERS
            if name not in SAME_HEADER
        ),
    ],
)
def test_slice_whose_header_differs_from_the_manifest_is_refused_though_its_fast_hash_is_right(
    dataset: tuple[Path, SliceInfo, Manifest], data: bytes, samples: int, code: str
) -> None:
    folder, info, manifest = dataset
    info = replaced(info, folder / info.file, data, samples)
    with pytest.raises(DataError, match=rf"{code}.*slice 17 "):
        SliceChecker(trusts_manifest=True).decode(read_slice_file(folder, info), info, manifest)


def test_describe_of_mixed_tensors_gives_bounds_of_whole_numbers_only() -> None:
    arrays: Arrays = {
        "images": np.array([[[0.5]], [[-1.0]]], np.float32),
        "labels": np.array([3, -100], np.int64),
        "valid": np.array([True, False]),
    }
    samples, tensors = describe(arrays, "")
    assert samples == 2
    assert tensors == (
        TensorInfo("images", "float32", (1, 1)),
        TensorInfo("labels", "int64", (), -100, 3),
        TensorInfo("valid", "bool", (), 0, 1),
    )
