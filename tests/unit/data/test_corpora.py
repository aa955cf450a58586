"""Sources: every kind of corpus gives its documents, and what is damaged says where."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
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

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.provenance import Account
from hypha_ray.data.sources.documents import digits, documents
from hypha_ray.data.sources.files import PIECE_CHARACTERS
from hypha_ray.errors import DataError, HubError

TEXTS = ["first", "zweites – ü", "第三"]


def read(source: Path | str, **options: Any) -> list[str]:
    return list(documents(PrepareOptions(str(source), Path("out"), **options)))


def json_lines(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts), encoding="utf-8")
    return path


def parquet_file(path: Path, texts: list[str | None], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table({column: texts, "n": list(range(len(texts)))}), path)
    return path


@pytest.mark.slow
def test_stdlib_gives_each_module_of_this_interpreter_in_the_same_order() -> None:
    found = read("stdlib")
    assert found == read("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    assert {(root / "difflib.py").read_text(encoding="utf-8"), (root / "json" / "decoder.py").read_text()} <= set(found)
    assert sum(map(len, found)) > 5_000_000


def test_long_text_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a long story\n" for number in range(10_000))
    (tmp_path / "a.txt").write_text(text)
    found = read(tmp_path / "a.txt")
    assert len(found) > 3
    assert "".join(found) == text
    assert all(piece.endswith("\n") and len(piece) < PIECE_CHARACTERS + 100 for piece in found)


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
    found, account = account_of(tmp_path / "several", split="test")
    assert (found, omissions(account)) == (["two"], {("splits", "not requested, see --split", 1, ("train",))})


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
    ("archive", "a.tar.gz", gzip.compress(b"name\0\0\0text"), r"DATA031.*a\.tar\.gz is binary"),
    ("no JSON", "a.jsonl", b'{"text": "one"}\n{"text": ', r"DATA031.*a\.jsonl, line 2: not JSON"),
    ("deep JSON", "a.jsonl", b"[" * 100_000, r"DATA031.*line 1: not JSON"),
    ("no object", "a.jsonl", b'["one"]', r"DATA031.*line 1.*got list"),
    ("no such column", "a.jsonl", b'{"txt": "one"}', r"DATA032.*line 1.*'text'.*got txt"),
    ("no text", "a.jsonl", b'{"text": 7}', r"DATA031.*line 1.*got int"),
    ("truncated gzip", "a.txt.gz", gzip.compress(b"one" * 1000)[:-9], r"DATA031.*can't be read"),
    ("no gzip", "a.txt.gz", b"one", r"DATA031.*can't be read"),
    ("no xz", "a.txt.xz", b"one", r"DATA031.*can't be read"),
    ("no bz2", "a.txt.bz2", b"one", r"DATA031.*can't be read"),
    ("no Parquet", "a.parquet", b"one", r"DATA031.*isn't a Parquet file"),
    ("two texts", "a.csv", b"title,body,n\na,b,1\n",
     r"DATA032.*a\.csv has no column 'text' — got body, n, title.*--text-column"),
    ("table without text", "a.csv", b"a,b\n1,2\n", r"DATA032.*no column 'text'"),
    ("open quote", "a.csv", b'text,n\none,1\n"two,2\nthree,3\n', r"DATA031.*line \d: not CSV"),
    ("text behind a quote", "a.csv", b'text,n\n"one" two,1\n', r"DATA031.*line 2: not CSV"),
    ("column twice", "a.csv", b"text,text\na,b\n", r"DATA032.*two columns of the same name"),
    ("latin-1 table", "a.csv", "text\né\n".encode("latin-1"), r"DATA031.*isn't UTF-8"),
]  # fmt: skip


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


# ── files of texts ──────────────────────────────────────────────────────────────────────────────────────────────────

FILES: list[tuple[str, str, bytes, list[str]]] = [
    ("text", "a.txt", "one\n\ntwo ü\n".encode(), ["one\n\ntwo ü\n"]),
    ("text with a byte order mark", "a.txt", b"\xef\xbb\xbfone", ["one"]),
    ("JSON lines", "a.json", b'{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
    ("JSON lines without text", "a.jsonl", b'{"text": "one"}\n\n{"text": ""}\n{"text": null}', ["one"]),
    ("half a surrogate pair", "a.jsonl", b'{"text": "a\\ud83db"}', ["a?b"]),
    ("JSON list", "a.json", b'\n[{"text": "one"}, {"text": "two"}]', ["one", "two"]),
    ("JSON list over lines", "a.json", b'[\n  {"text": "one"},\n  {"text": "two"}\n]\n', ["one", "two"]),
    ("compressed JSON list over lines", "a.json.gz", gzip.compress(b'[\n  {"text": "one"}\n]\n'), ["one"]),
    ("JSON object over lines", "a.json", b'{\n "text": "one"\n}\n', ["one"]),
    ("compressed JSON lines", "a.json.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'), ["one", "two"]),
    ("compressed JSON list", "a.json.gz", gzip.compress(b'\n[{"text": "one"}, {"text": "two"}]'), ["one", "two"]),
    ("plain", "a.csv", b"label,text\n1,one\n0,two\n", ["one", "two"]),
    ("upper case", "A.CSV", b"label,text\n1,one\n", ["one"]),
    ("quoted", "a.csv", b'text,n\n"one, ""two""",1\n"a\nb\n",2\n', ['one, "two"', "a\nb\n"]),
    ("quoted head", "a.csv", b'"text","a,b"\none,1\n', ["one"]),
    ("byte order mark", "a.csv", b"\xef\xbb\xbftext,n\none,1\n", ["one"]),
    ("semicolons", "a.csv", b"n;text\n1;one, two\n", ["one, two"]),
    ("tabs", "a.tsv", b"n\ttext\n1\tone, two; three\n", ["one, two; three"]),
    ("tabs in a CSV", "a.csv", b"n\ttext\n1\tone\n", ["one"]),
    ("line ends of Windows", "a.csv", b"n,text\r\n1,one\r\n2,two\r\n", ["one", "two"]),
    ("compressed", "a.csv.gz", gzip.compress(b"n,text\n1,one\n"), ["one"]),
    ("the only text", "a.csv", b"id,score,body\n1,0.5,one\n2,,two\n", ["one", "two"]),
    ("one column", "a.csv", b"body\none\ntwo\n", ["one", "two"]),
    ("blank lines", "a.csv", b"n,text\n\n1,one\n\n", ["one"]),
    ("long field", "a.csv", b"text\n" + b"a" * 300_000 + b"\n", ["a" * 300_000]),
]


@pytest.mark.parametrize(("name", "data", "expected"), [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_file_is_read_alone_and_in_its_folder(tmp_path: Path, name: str, data: bytes, expected: list[str]) -> None:
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == expected
    assert read(tmp_path) == expected


def test_csv_gives_the_column_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body\na,b\n")
    assert read(tmp_path / "a.csv", text_column="body") == ["b"]
    with pytest.raises(DataError, match=r"DATA032.*'bdy'"):
        read(tmp_path / "a.csv", text_column="bdy")


# ── what is left out ──────────────────────────────────────────────────────────────────────────────────────────────


def account_of(source: Path | str, **options: Any) -> tuple[list[str], Account]:
    account = Account()
    return list(documents(PrepareOptions(str(source), Path("out"), **options), account)), account


def omissions(account: Account) -> set[tuple[str, str, int, tuple[str, ...]]]:
    return {(each.what, each.reason, each.count, each.names) for each in account.origin().omissions}


def test_files_of_a_folder_that_are_left_out_are_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "notes.unknown").write_text("two")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0\0")
    (tmp_path / "old.txt").write_bytes(b"a" * (3 << 20) + "é".encode("latin-1"))
    (tmp_path / "half.txt.gz").write_bytes(gzip.compress(b"one" * 1000)[:-9])
    (tmp_path / "nothing.md").write_bytes(b"")
    (tmp_path / ".hidden").write_text("three")
    (tmp_path / ".git").mkdir()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "link").symlink_to(tmp_path.parent)
    found, account = account_of(tmp_path)
    assert found == ["one", "two"]
    assert (account.files, account.documents) == (2, 2)
    assert omissions(account) == {
        ("files", "binary", 1, ("image.png",)),
        ("files", "not UTF-8", 1, ("old.txt",)),
        ("files", "can't be read, damaged", 1, ("half.txt.gz",)),
        ("files", "empty", 1, ("nothing.md",)),
        ("files", "hidden", 1, (".hidden",)),
        ("files", "not regular files", 1, ("gone.txt",)),
        ("folders", "hidden", 1, (".git",)),
        ("folders", "links, which are not followed", 1, ("link",)),
    }


def test_pattern_leaves_files_out_that_are_no_text_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    found, account = account_of(f"{tmp_path}/*.txt")
    assert (found, omissions(account)) == (["one"], {("files", "not UTF-8", 1, (f"{tmp_path}/b.txt",))})


def test_many_files_that_are_left_out_are_counted_and_a_few_named(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.png").write_bytes(b"\0")
    (tmp_path / "a.txt").write_text("one")
    _, account = account_of(tmp_path)
    assert [str(each) for each in account.origin().omissions] == [
        "        9 files: binary (0.png, 1.png, 2.png, 3.png, 4.png, …)"
    ]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_rows_without_text_and_columns_beside_it_are_counted(tmp_path: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [{"text": text, "label": 1} for text in ("one", "", None, "  ", "two")]
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif kind == "csv":
        file.write_text("text,label\n" + "".join(f"{row['text'] or ''},1\n" for row in rows))
    else:
        lines = [json.dumps(row) for row in rows]
        file.write_text("\n".join(lines) if kind == "jsonl" else f"[{', '.join(lines)}]")
    found, account = account_of(file)
    assert found == ["one", "two"]
    assert omissions(account) == {
        ("rows", "without text", 3, ()),
        ("columns", "not used; only the text is", 1, ("label",)),
    }


def test_rows_whose_text_is_something_else_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 7}\n{"txt": "two"}\n{"text": ["three"]}\n')
    found, account = account_of(tmp_path / "a.jsonl")
    assert found == ["one"]
    assert {key[:3] for key in omissions(account)} == {
        ("rows", "text isn't text", 2),
        ("rows", "without text", 1),
        ("columns", "not used; only the text is", 1),
    }


def test_csv_rows_that_do_not_fit_are_counted_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,text\n1,one\n2,two, three\n3\n")
    found, account = account_of(tmp_path / "a.csv")
    assert found == ["one"]
    names = ("a.csv, line 3", "a.csv, line 4")
    assert omissions(account) >= {("rows", "more or fewer fields than columns", 2, names)}


def test_csv_whose_text_has_another_name_says_which(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,body\n1,one\n")
    _, account = account_of(tmp_path / "a.csv")
    note = "the text of a.csv is its column 'body', the only one with text; its first line is no sample"
    assert account.origin().notes == (note,)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("a.csv", "a fine film,1\na dull film,0\n"),
        ("a.csv", "a fine film,good\na dull film,bad\na great film,good\nlovely,good\n"),
        ("a.csv", '0.5;"one, two"\n0.7;three\n'),
        ("a.tsv", "17\tone\n18\ttwo\n"),
        ("a.csv", "long " * 20 + "\ntwo\n"),
    ],
)
def test_csv_without_a_header_is_refused_instead_of_losing_its_first_row(tmp_path: Path, name: str, table: str) -> None:
    (tmp_path / name).write_text(table)
    with pytest.raises(DataError, match=rf"DATA032.*{name} begins with a row.*names of the columns"):
        account_of(tmp_path / name)


@pytest.mark.parametrize(
    "table",
    [
        ",0\n0,one\n1,two\n",  # As pandas writes a frame without names.
        "body\none\nbody\ntwo\nbody\n",  # Tables that were joined.
        "word\nword\none\n",
    ],
)
def test_csv_with_unusual_names_is_read(tmp_path: Path, table: str) -> None:
    (tmp_path / "a.csv").write_text(table)
    texts, _ = account_of(tmp_path / "a.csv")
    assert "one" in texts


def test_files_beside_parquet_and_of_other_splits_are_named(tmp_path: Path) -> None:
    parquet_file(tmp_path / "train.parquet", ["one"])
    parquet_file(tmp_path / "more-train.parquet", ["two"])
    parquet_file(tmp_path / "test.parquet", ["three"])
    json_lines(tmp_path / "extra.jsonl", ["four"])
    (tmp_path / "notes.txt").write_text("five")
    found, account = account_of(tmp_path)
    assert sorted(found) == ["one", "two"]
    beside = "beside Parquet; a pattern such as 'DIR/**/*.txt' reads them"
    assert omissions(account) >= {
        ("files", "of split test", 1, ("test.parquet",)),
        ("files", beside, 2, ("extra.jsonl", "notes.txt")),
    }


def test_folder_of_text_with_a_little_parquet_gives_all(tmp_path: Path) -> None:
    parquet_file(tmp_path / "a.parquet", ["one"])
    for name in ("b", "c", "d"):
        json_lines(tmp_path / f"{name}.jsonl", [name])
    found, account = account_of(tmp_path)
    assert (found, account.files) == (["one", "b", "c", "d"], 4)
    assert omissions(account) == {("columns", "not used; only the text is", 1, ("n",))}


def test_names_that_are_no_utf8_are_read_and_shown(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff.txt")).write_text("one")
    (tmp_path / os.fsdecode(b"b\xff\n.png")).write_bytes(b"\0")
    parquet_file(tmp_path / "plain.parquet", ["two"]).rename(tmp_path / os.fsdecode(b"c\xff.parquet"))
    assert read(tmp_path / os.fsdecode(b"c\xff.parquet")) == ["two"]
    found, account = account_of(tmp_path)
    assert found == ["one", "two"]
    assert ("files", "binary", 1, ("b??.png",)) in omissions(account)


def test_tables_of_a_folder_that_have_no_text_are_left_out_whole(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "package.json").write_text('{"name": "x", "version": 1}')
    (tmp_path / "tsconfig.json").write_text("// a comment\n{}")
    (tmp_path / "two.csv").write_text("title,body\na,b\n")
    found, account = account_of(tmp_path)
    assert (found, account.files) == (["one"], 1)
    assert omissions(account) == {
        ("files", "no text column", 2, ("package.json has name, version", "two.csv has body, title")),
        ("files", "damaged", 1, ("tsconfig.json",)),
        ("columns", "not used; only the text is", 1, ("n",)),
    }


def test_folder_of_tables_without_text_is_refused_with_their_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("title,body\na,b\n")
    with pytest.raises(DataError, match=r"DATA032.*a\.csv.*got body, title"):
        read(tmp_path)


def test_damage_behind_the_first_row_is_refused_in_a_folder_too(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", ["one"])
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": ')
    with pytest.raises(DataError, match=r"DATA031.*b\.jsonl, line 2"):
        read(tmp_path)
