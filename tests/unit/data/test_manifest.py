"""Manifests, the commands and names in them, the catalogue, and folders of bare files."""

from __future__ import annotations

import json
import pickle
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import hypha_ray
from hypha_ray.config.training import Dataset
from hypha_ray.data.catalogue import find, load, locate, name_of
from hypha_ray.data.manifest import MOST_BYTES, PreprocessorInfo, TensorInfo, parse_manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import made_by, prepare
from hypha_ray.data.provenance import MadeBy
from hypha_ray.data.slices import read_slice
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.types import SliceInfo
from tests.support.prepared import prepared, table

DATE = "2026-01-31T12:00:00+00:00"


def fill(folder: Path, *names: str, high: int = 50, seq_len: int = 4) -> Path:
    """Slices as a user would save them; the n-th has n samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names, 1):
        ids = np.full((number, seq_len), number, np.int64)
        ids[0, 0] = high + number
        safetensors.numpy.save_file({"input_ids": ids, "attention_mask": np.ones_like(ids)}, folder / name)
    return folder


@contextmanager
def full_disk() -> Iterator[None]:
    """No byte can be written to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = fill(tmp_path / "stories", "slice-00000.safetensors", "slice-00001.safetensors")
    load(folder)
    return folder


def edited(folder: Path, **changes: Any) -> Path:
    """Change the manifest, or with ``slice_…`` its first slice."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for key, value in changes.items():
        target = manifest["slices"][0] if key.startswith("slice_") else manifest
        target[key.removeprefix("slice_")] = value
    path.write_text(json.dumps(manifest))
    return folder


def test_manifest_saved_and_loaded_is_the_same(dataset: Path) -> None:
    manifest = load(dataset).model_copy(update={"preprocessor": PreprocessorInfo("byte", None, "tokenizer", 384)})
    manifest.save(dataset)
    assert load(dataset) == manifest
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_manifest_file_has_what_other_programs_rely_on(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["name"], manifest["modality"]) == (1, "stories", "language")
    assert [entry["file"] for entry in manifest["slices"]] == ["slice-00000.safetensors", "slice-00001.safetensors"]
    assert [entry["samples"] for entry in manifest["slices"]] == [1, 2]
    assert {entry["split"] for entry in manifest["slices"]} == {"train"}


def test_manifest_with_keys_of_later_releases_is_read(dataset: Path) -> None:
    before = load(dataset)
    assert load(edited(dataset, licence="CC0", slice_rows=7)) == before


def test_manifest_that_cannot_be_written_leaves_the_old_one(dataset: Path) -> None:
    before = load(dataset)
    with full_disk(), pytest.raises(OSError, match="too large"):
        before.model_copy(update={"name": "other"}).save(dataset)
    assert load(dataset) == before
    assert len(list(dataset.iterdir())) == 3


MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("no slices", {"slices": []}, "no slices"),
    ("a missing key", {"slices": [{"index": 0}]}, "slices.0.file"),
    ("a wrong type", {"slice_samples": "many"}, "slices.0.samples"),
    ("a number as text", {"slice_samples": "1"}, "slices.0.samples"),
    ("an unknown modality", {"modality": "smell"}, "modality"),
    ("an unknown split", {"slice_split": "test"}, "split 'test'"),
    ("no samples", {"slice_samples": 0}, "0 samples"),
    ("two slices with the same index", {"slice_index": 1}, "same index"),
    ("a negative index", {"slice_index": -1}, "slice -1"),
    ("no checksum", {"slice_sha256": "abc"}, "sha256"),
    ("a missing file", {"slice_file": "slice-00009.safetensors"}, "doesn't exist"),
    ("a path out of the folder", {"slice_file": "../stories/slice-00000.safetensors"}, "plain name"),
    ("an absolute path", {"slice_file": "/etc/passwd"}, "plain name"),
    ("an unknown dtype", {"tensors": [{"name": "a", "dtype": "object", "shape": [1]}]}, "dtype 'object'"),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_manifest_with_nonsense_is_refused(dataset: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=rf"DATA003.*manifest\.json.*{words}"):
        load(edited(dataset, **changes))


TENSOR = {"name": "input_ids", "dtype": "int32", "shape": [8], "minimum": 0, "maximum": 3}
OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"part": [0, 10**9]}, "part 0 of 1000000000"),
    ({"part": [-1, 0]}, "part -1 of 0"),
    ({"part": [5, 2]}, "part 5 of 2"),
    ({"part": [0, 10**400]}, "part 0 of 1000000"),
    ({"tensors": [{**TENSOR, "shape": [-1]}]}, "the shape [-1]"),
    ({"tensors": [{**TENSOR, "shape": [1 << 62]}]}, "has 184467440737095516"),
    ({"tensors": [{**TENSOR, "shape": [1] * 33}]}, "the shape [1, 1"),
    ({"tensors": [{**TENSOR, "maximum": 1 << 64}]}, "more than 64 bits"),
    ({"slice_samples": 10**18}, "1000000000000000000 samples"),
    ({"slice_samples": 1 << 41}, "2199023255552 samples"),
    ({"slice_index": 10**30}, "the index 1000000"),
    ({"slice_index": 1 << 40}, "the index 1099511627776"),
    ({"slice_index": -(10**30)}, "slice -1000000"),
    ({"name": "a\n\x1b[31mb"}, "control characters"),
]
"""Numbers that no dataset has, with words of the refusal."""


@pytest.mark.parametrize(("changes", "words"), OUT_OF_BOUNDS, ids=[words for _, words in OUT_OF_BOUNDS])
def test_manifest_with_numbers_that_no_dataset_has_is_refused(
    dataset: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError) as caught:
        load(edited(dataset, **changes))
    assert caught.value.code == "DATA003" and words in caught.value.got and len(caught.value.got) < 300


def test_manifest_larger_than_its_limit_is_refused_without_being_read(dataset: Path) -> None:
    with (dataset / "manifest.json").open("r+b") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(DataError, match="is too large — got 67,108,865 bytes, allowed 67,108,864 bytes"):
        load(dataset)
    with pytest.raises(DataError, match="is too large"):
        parse_manifest(b" " * (MOST_BYTES + 1), "the manifest of a data node")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\xff\xfe", '"manifest"'])
def test_manifest_that_is_no_object_is_refused(dataset: Path, text: str) -> None:
    (dataset / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="DATA003"):
        load(dataset)


def test_manifest_of_a_later_format_names_both_versions(dataset: Path) -> None:
    with pytest.raises(DataError, match=r"DATA004.*got 2, allowed 1.*update"):
        load(edited(dataset, format_version=2))


def test_manifest_sums_by_split(tmp_path: Path) -> None:
    manifest = load(fill(tmp_path / "d", "a.safetensors", "b.safetensors", "val.safetensors"))
    assert (manifest.samples("train"), manifest.samples("validation")) == (3, 3)
    assert [info.file for info in manifest.of("validation")] == ["val.safetensors"]
    assert manifest.sample_bytes == 2 * 4 * 8
    assert {tensor.name: tensor.maximum for tensor in manifest.tensors}["input_ids"] == 53


def test_require_refuses_a_vocabulary_that_ends_at_the_largest_id(dataset: Path) -> None:
    manifest = load(dataset)
    manifest.require(vocab_size=53, classes=1)
    manifest.require()
    with pytest.raises(DataError, match=r"vocabulary.*up to 52, allowed 0 … 51.*at least 53"):
        manifest.require(vocab_size=52)


def test_require_refuses_too_few_classes(tmp_path: Path) -> None:
    arrays = {"images": np.zeros((3, 1, 2, 2), np.float32), "labels": np.array([0, 9, 4])}
    safetensors.numpy.save_file(arrays, tmp_path / "a.safetensors")
    manifest = load(tmp_path)
    assert manifest.modality == "vision"
    manifest.require(classes=10)
    with pytest.raises(DataError, match=r"number of classes.*up to 9"):
        manifest.require(classes=9)


def test_bare_folder_on_first_use_is_indexed_in_order_of_names(tmp_path: Path) -> None:
    folder = fill(tmp_path / "bare", "c.safetensors", "a.safetensors", "b.safetensors")
    manifest = load(folder)
    assert [(info.index, info.file, info.samples) for info in manifest.slices] == [
        (0, "a.safetensors", 2),
        (1, "b.safetensors", 3),
        (2, "c.safetensors", 1),
    ]
    assert manifest.tensors == (
        TensorInfo("attention_mask", "int64", (4,), 1, 1),
        TensorInfo("input_ids", "int64", (4,), 1, 53),
    )
    for info in manifest.slices:
        assert len(read_slice(folder, info, manifest)["input_ids"]) == info.samples
    assert load(folder) == manifest


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("val.safetensors", "validation"),
        ("my-Validation_003.safetensors", "validation"),
        ("test-00000-of-00001.safetensors", "validation"),
        ("interval.safetensors", "train"),
        ("latest.safetensors", "train"),
        ("part3.safetensors", "train"),
    ],
)
def test_bare_file_goes_to_the_split_that_its_name_says(tmp_path: Path, file: str, split: str) -> None:
    manifest = load(fill(tmp_path, "train.safetensors", file))
    assert {info.file: info.split for info in manifest.slices}[file] == split


def test_bare_folder_of_held_out_names_only_is_trained_on(tmp_path: Path) -> None:
    assert load(fill(tmp_path, "test-0.safetensors", "test-1.safetensors")).samples("train") == 3


def test_bare_folder_that_cannot_be_written_is_indexed_in_memory(tmp_path: Path) -> None:
    folder = fill(tmp_path, "a.safetensors")
    with full_disk():
        manifest = load(folder)
    assert manifest.samples("train") == 1
    assert [path.name for path in folder.iterdir()] == ["a.safetensors"]


def test_bare_folder_of_unequal_lengths_names_the_slice_that_differs(tmp_path: Path) -> None:
    fill(tmp_path, "a.safetensors")
    fill(tmp_path, "b.safetensors", seq_len=5)
    with pytest.raises(
        DataError, match=r"DATA017.*slice 1 \(b\.safetensors\).*\[N, 5\].*\[N, 4\].*same sequence length"
    ):
        load(tmp_path)


def test_bare_folder_of_other_tensors_has_another_modality(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"past_values": np.zeros((2, 3))}, tmp_path / "a.safetensors")
    assert load(tmp_path).modality == "other"


def test_folder_without_slices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA002.*contains no slices.*jobs/prepare.py"):
        load(tmp_path)


def test_folder_that_was_left_unfinished_is_refused(tmp_path: Path) -> None:
    (fill(tmp_path, "slice-00000.safetensors") / ".unfinished").mkdir()
    with pytest.raises(DataError, match=r"DATA006.*didn't finish"):
        load(tmp_path)


def test_folder_that_is_missing_suggests_its_nearest_sibling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dataset: Path
) -> None:
    (fill(tmp_path / "digits", "a.safetensors") / "tokenizer_config.json").touch()
    (tmp_path / "storie").mkdir()
    for model, config in (("storyd", "config.json"), ("adapter", "adapter_config.json")):
        (fill(tmp_path / model, "model.safetensors") / config).touch()
    with pytest.raises(DataError, match=r"DATA001.*storys.*did you mean 'stories'"):
        load(tmp_path / "storys")
    with pytest.raises(DataError, match=r"choose one of digits, stories"):
        load(tmp_path / "xyz")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"no dataset at data/xyz in {re.escape(str(tmp_path))}. Fix:"):
        load("data/xyz")
    with pytest.raises(DataError, match=r"jobs/prepare.py"):
        load(tmp_path / "nowhere" / "xyz")


def test_file_in_place_of_a_folder_is_refused(dataset: Path) -> None:
    with pytest.raises(DataError, match=r"is a file"):
        load(dataset / "manifest.json")


def test_find_by_name_looks_below_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path))
    folder = fill(tmp_path / "datasets" / "stories", "a.safetensors")
    assert find("stories") == folder
    assert locate(Dataset(name="stories")) == folder
    with pytest.raises(DataError, match=r"DATA001.*'storys'.*datasets.*did you mean 'stories'"):
        find("storys")


def test_find_with_several_places_takes_the_first(tmp_path: Path) -> None:
    first, second = (fill(tmp_path / place / "d", "a.safetensors") for place in "ab")
    assert find("d", [tmp_path / "none", first.parent, second.parent]) == first


def test_locate_by_path_expands_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = fill(tmp_path / "d", "a.safetensors")
    assert locate(Dataset(path="~/d")) == folder


@pytest.mark.parametrize(("table", "found"), [({}, "neither"), ({"path": "a", "name": "b"}, "both")])
def test_locate_without_one_way_is_refused(table: dict[str, str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        locate(Dataset.model_construct(**{"path": None, "name": None, **table}))


def test_slice_info_of_the_manifest_is_the_shared_record(dataset: Path) -> None:
    assert all(isinstance(info, SliceInfo) for info in load(dataset).slices)


def test_manifest_has_source_options_version_and_date(tmp_path: Path) -> None:
    source = table(tmp_path / "rows.jsonl", *({"q": f"{n}=", "a": n, "more": n} for n in range(9)))
    options: dict[str, Any] = {
        "prompt_column": "q",
        "answer_column": "a",
        "keep_columns": ["more"],
        "seed": 3,
    }
    out = str(tmp_path / "out")
    prepare(PrepareOptions(str(source), out, seq_len=256, overwrite=True, **options), lambda what, number: None, DATE)
    assert load(tmp_path / "out").made_by == MadeBy(str(source), options, hypha_ray.__version__, DATE)


def test_record_has_no_secrets_of_urls_and_no_place_of_the_dataset() -> None:
    source = "https://me:s3cret@example.com/a.csv?token=abcdef"
    template = Path("a.jinja")
    out = "s3://key:s3cret@bucket/out"
    options = PrepareOptions(source, out, chat=True, chat_template=template, tokenizer="https://x:s3cret@example.com/t")
    record = made_by(options, DATE)
    assert "s3cret" not in repr(record) and "abcdef" not in repr(record)
    assert record.options["chat_template"] == "a.jinja" and "out" not in record.options


def test_identity_of_a_dataset_doesnt_depend_on_the_command_and_its_date(tmp_path: Path) -> None:
    first = prepared("digits", tmp_path / "first", max_samples=40)
    again = prepared("digits", tmp_path / "again", max_samples=40)
    assert first.made_by is not None
    assert first.model_copy(update={"made_by": None}).identity == first.identity == again.identity


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("/data/sort2/", "sort2"),
        ("s3://bucket/sets/sort2", "sort2"),
        ("https://host/sets/sort2?token=s3cret", "sort2"),
        ("https://host/sets/sort2/?X-Amz-Signature=a/b", "sort2"),
        ("/data/what?", "what?"),
    ],
)
def test_dataset_is_named_after_its_folder_and_never_after_a_secret(place: str, name: str) -> None:
    assert name_of(place) == name


def test_dataset_prepared_at_a_url_with_a_secret_has_none_in_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("word " * 400)
    manifest = prepared(str(tmp_path / "text.txt"), "memory://sets/words?sig=s3cret", seq_len=8, validation_samples=4)
    assert manifest.name == "words" and "s3cret" not in str(manifest)
