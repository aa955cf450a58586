"""Sources: every kind of corpus gives its documents, and what is damaged says where."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from hypha_ray.data.corpora import PIECE_CHARACTERS, digits, documents
from hypha_ray.data.options import Options
from hypha_ray.errors import DataError, HubError

TEXTS = ["first", "zweites – ü", "第三"]


def read(source: Path | str, **options: Any) -> list[str]:
    return list(documents(Options(str(source), Path("out"), **options)))


def json_lines(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts), encoding="utf-8")
    return path


def parquet_file(path: Path, texts: list[str | None], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({column: texts, "n": list(range(len(texts)))}), path)
    return path


def test_stdlib_gives_each_module_of_this_interpreter_in_the_same_order() -> None:
    found = read("stdlib")
    assert found == read("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    assert {(root / "difflib.py").read_text(encoding="utf-8"), (root / "json" / "decoder.py").read_text()} <= set(found)
    assert sum(map(len, found)) > 5_000_000


def test_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo ü\n", encoding="utf-8")
    assert read(tmp_path / "a.txt") == ["one\n\ntwo ü\n"]


def test_long_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a long story\n" for number in range(10_000))
    (tmp_path / "a.txt").write_text(text)
    found = read(tmp_path / "a.txt")
    assert len(found) > 3
    assert "".join(found) == text
    assert all(piece.endswith("\n") and len(piece) < PIECE_CHARACTERS + 100 for piece in found)


def test_text_file_with_a_byte_order_mark_is_read_without_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    assert read(tmp_path / "a.txt") == ["one"]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files_are_read(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    plain = json_lines(tmp_path / "a.jsonl", TEXTS).read_bytes()
    (tmp_path / f"b.jsonl{suffix}").write_bytes(compress(plain))
    assert read(tmp_path / f"b.jsonl{suffix}") == TEXTS
    (tmp_path / f"c.txt{suffix}").write_bytes(compress(b"one"))
    assert read(tmp_path / f"c.txt{suffix}") == ["one"]


def test_json_lines_give_the_named_column(tmp_path: Path) -> None:
    assert read(json_lines(tmp_path / "a.jsonl", TEXTS)) == TEXTS
    assert read(json_lines(tmp_path / "b.jsonl", TEXTS, "body"), text_column="body") == TEXTS


def test_json_lines_without_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": null}\n{"text": "two"}')
    assert read(tmp_path / "a.jsonl") == ["one", "two"]


def test_json_lines_with_half_a_surrogate_pair_give_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83db"}')
    assert read(tmp_path / "a.jsonl") == ["a?b"]


def test_parquet_file_gives_the_named_column(tmp_path: Path) -> None:
    assert read(parquet_file(tmp_path / "a.parquet", ["one", None, "", "two"])) == ["one", "two"]
    assert read(parquet_file(tmp_path / "b.parquet", list(TEXTS), "body"), text_column="body") == TEXTS


def test_folder_gives_its_files_by_name_without_hidden_and_binary_ones(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.md").write_text("two")
    (tmp_path / "sub" / "c.py").write_text("three")
    json_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0\0")
    assert read(tmp_path) == ["one", "two", "three"]


def test_pattern_gives_the_files_that_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt", "c.md", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert read(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "sub/d.txt"]
    monkeypatch.chdir(tmp_path)
    assert read("[ab].*") == ["a.txt", "b.txt"]


def test_local_dataset_in_the_layout_of_the_hub_gives_the_split_asked_for(tmp_path: Path) -> None:
    parquet_file(tmp_path / "data" / "train-00000-of-00002.parquet", ["one"])
    parquet_file(tmp_path / "data" / "train-00001-of-00002.parquet", ["two"])
    parquet_file(tmp_path / "data" / "test-00000-of-00001.parquet", ["three"])
    assert read(tmp_path) == ["one", "two"]
    assert read(tmp_path, split="test") == ["three"]
    with pytest.raises(DataError, match=r"HUB004.*--split"):
        read(tmp_path, split="trian")


def test_local_dataset_saved_to_disk_is_read(tmp_path: Path) -> None:
    train, test = (datasets.Dataset.from_dict({"text": [text]}) for text in ("one", "two"))
    train.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "several")
    assert read(tmp_path / "single") == ["one"]
    assert read(tmp_path / "several", split="test") == ["two"]


def test_local_dataset_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    parquet_file(tmp_path / "train.parquet", ["one"], "body")
    for source in (tmp_path, tmp_path / "train.parquet"):
        with pytest.raises(DataError, match=r"DATA032.*'text'.*got body, n.*--text-column"):
            read(source)


def test_hub_dataset_without_network_names_cache_and_switch() -> None:
    with pytest.raises(HubError) as caught:
        read("somebody/some-dataset")
    assert caught.value.code == "HUB003"
    assert constants.HF_HOME in caught.value.fix
    assert "HF_HUB_OFFLINE" in str(caught.value)


DAMAGED: list[tuple[str, str, bytes, str]] = [
    ("latin-1 text", "a.txt", "é".encode("latin-1"), r"DATA031.*a\.txt isn't UTF-8"),
    ("no JSON", "a.jsonl", b'{"text": "one"}\n{"text": ', r"DATA031.*a\.jsonl, line 2: no JSON"),
    ("deep JSON", "a.jsonl", b"[" * 100_000, r"DATA031.*line 1: no JSON"),
    ("no object", "a.jsonl", b'["one"]', r"DATA031.*line 1.*got list"),
    ("no such column", "a.jsonl", b'{"txt": "one"}', r"DATA032.*line 1.*'text'.*got txt"),
    ("no text", "a.jsonl", b'{"text": 7}', r"DATA031.*line 1.*got int"),
    ("truncated gzip", "a.txt.gz", gzip.compress(b"one" * 1000)[:-9], r"DATA031.*can't be read"),
    ("no gzip", "a.txt.gz", b"one", r"DATA031.*can't be read"),
    ("no xz", "a.txt.xz", b"one", r"DATA031.*can't be read"),
    ("no bz2", "a.txt.bz2", b"one", r"DATA031.*can't be read"),
    ("no Parquet", "a.parquet", b"one", r"DATA031.*no Parquet file"),
]


@pytest.mark.parametrize(("name", "data", "words"), [case[1:] for case in DAMAGED], ids=[case[0] for case in DAMAGED])
def test_damaged_file_is_refused_by_name(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words):
        read(tmp_path / name)


@pytest.mark.parametrize("source", ["corpus.txt", "a/b/c", "/nowhere/at/all", "a.parquet", "what is this?!"])
def test_missing_file_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(DataError, match="DATA030"):
        read(source)


def test_missing_file_suggests_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("one")
    with pytest.raises(DataError, match=r"did you mean 'corpus\.txt'"):
        read(tmp_path / "corpsu.txt")


@pytest.mark.parametrize("pattern", ["*.txt", "a**/*.txt"])
def test_pattern_without_files_is_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(DataError, match="DATA030"):
        read(tmp_path / pattern)


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0\0")
    with pytest.raises(DataError, match="DATA030"):
        read(tmp_path)


def test_digits_are_images_from_zero_to_one_with_their_labels() -> None:
    arrays = digits()
    images, labels = arrays["images"], arrays["labels"]
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), np.float32)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert (labels.dtype, sorted(set(labels.tolist()))) == (np.int64, list(range(10)))
