"""Datasets at URLs, on real servers of this machine: prepared there, read, and refused with the reason."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import s3fs

from hypha_ray.data.catalogue import load
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.slices import Arrays
from hypha_ray.data.storage import DiskCache, FolderFiles, UrlFiles, preprocessor_files
from hypha_ray.errors import ConfigError, HyphaError, TryAgainError
from hypha_ray.texts import redacted
from hypha_ray.types import SLICES_PER_PART
from tests.support.web import s3_of, web_of


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 10_000_000)


def equal(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def refusal(url: str, cache: DiskCache) -> HyphaError:
    with pytest.raises(HyphaError) as caught:
        UrlFiles(url, cache).manifest()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.slow
def test_dataset_by_http_is_that_of_the_folder_and_each_slice_is_fetched_once(corpus: Path, cache: DiskCache) -> None:
    folder = FolderFiles(corpus)
    with web_of(corpus.parent) as web:
        url = f"{web.url}/{corpus.name}"
        for _ in range(3):
            files = UrlFiles(url, cache)
            assert files.manifest() == folder.manifest()
            assert all(equal(files.read(info), folder.read(info)) for info in files.manifest().slices)
        slices = {name: count for name, count in web.fetched.items() if name.endswith(".safetensors")}
        assert len(slices) == 16 and set(slices.values()) == {1}
        assert files.preprocessor() == {
            name: content for name, content in preprocessor_files(corpus).items() if name != "manifest.json"
        }


@pytest.mark.slow
def test_dataset_in_s3_is_that_of_the_folder(corpus: Path, cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_of(monkeypatch) as s3:
        s3.put(str(corpus), "bucket/data/texts", recursive=True)
        files, folder = UrlFiles("s3://bucket/data/texts/", cache), FolderFiles(corpus)
        assert files.manifest() == folder.manifest()
        info = files.manifest().slices[0]
        assert equal(files.read(info), folder.read(info)) and "tokenizer/tokenizer.json" in files.preprocessor()
        missing = refusal("s3://bucket/data/text", cache)
        assert (missing.code, missing.exit_code) == ("DATA001", 3)
        assert refusal("s3://nowhere/texts", cache).exit_code == 3


def test_damaged_copy_in_the_cache_is_fetched_again_and_a_damaged_original_is_not_kept(
    corpus: Path, tmp_path: Path, cache: DiskCache
) -> None:
    folder = shutil.copytree(corpus, tmp_path / "texts")
    info, other = load(folder).slices[:2]
    with web_of(folder) as web:
        files = UrlFiles(web.url, cache)
        right = files.read(info)
        (copy,) = (tmp_path / "cache").glob(f"??/{info.sha256}")
        copy.write_bytes(copy.read_bytes()[:-1])
        assert equal(files.read(info), right) and web.fetched[info.file] == 2
        assert equal(files.read(info), right) and web.fetched[info.file] == 2
        (folder / other.file).write_bytes(copy.read_bytes())
        with pytest.raises(HyphaError) as caught:
            files.read(other)
        assert caught.value.code == "DATA016"
        assert cache.read(other.sha256) is None


def test_cache_smaller_than_a_slice_says_so_once_and_reads_everything(corpus: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    with web_of(corpus) as web:
        files = UrlFiles(web.url, DiskCache(tmp_path / "cache", 100), notes.append)
        for info in files.manifest().slices:
            assert equal(files.read(info), FolderFiles(corpus).read(info))
    (note,) = notes
    assert "larger than the cache's limit of 100" in note
    assert not list((tmp_path / "cache").rglob("*"))


@pytest.mark.slow
def test_errors_that_may_pass_are_tried_again(corpus: Path, cache: DiskCache) -> None:
    with web_of(corpus) as web:
        web.statuses["manifest.json"] = [503, 429]
        assert UrlFiles(web.url, cache).manifest() == load(corpus)


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(401, "AUTH004", 4), (403, "AUTH004", 4), (404, "DATA001", 3), (410, "DATA001", 3), (400, "DATA001", 3)],
)
def test_status_of_http_has_its_error_without_a_second_try(
    corpus: Path, cache: DiskCache, status: int, code: str, exit_code: int
) -> None:
    with web_of(corpus) as web:
        web.statuses["manifest.json"] = [status]
        error = refusal(web.url, cache)
        assert (error.code, error.exit_code) == (code, exit_code) and not web.fetched


@pytest.mark.parametrize(
    ("url", "code", "exit_code"),
    [
        ("http://127.0.0.1:9/texts", "DATA065", 75),
        ("gs://bucket/texts", "DATA064", 2),
        ("nonsense://bucket/texts", "CFG003", 2),
        ("file:///no/such/folder", "DATA001", 3),
        ("hf://datasets/nobody/nothing", "DATA065", 75),
    ],
)
def test_place_that_cannot_be_read_has_one_error(
    url: str, code: str, exit_code: int, cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_ray.data.catalogue.WAITS_S", ())
    error = refusal(url, cache)
    assert (error.code, error.exit_code) == (code, exit_code), str(error)
    assert "the run goes on" not in str(error), "there may be no run"


@pytest.mark.slow
def test_missing_credentials_are_an_error_of_authentication(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_of(monkeypatch):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()
        assert refusal("s3://bucket/texts", cache).exit_code == 4


@pytest.mark.slow
def test_secrets_of_a_url_are_in_no_error(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hypha_ray.data.catalogue.WAITS_S", (0.0,))
    error = refusal("http://user:s3cretword@127.0.0.1:9/texts?token=topsecret", cache)
    assert "s3cretword" not in str(error) and "topsecret" not in str(error)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one sample each, of which no two are equal, and one that is there twice."""
    folder = tmp_path_factory.mktemp("texts")
    for number in range(300):
        (folder / f"{number:03}.txt").write_text(f"{number:03} " * 6 + "end of it")
    (folder / "again.txt").write_text((folder / "007.txt").read_text())
    return folder


def options(source: Path, out: Path | str, **more: Any) -> PrepareOptions:
    return PrepareOptions(str(source), str(out), seq_len=8, samples_per_slice=20, validation_samples=16, **more)


def quiet(what: str, count: int) -> None:
    """Report to nobody."""


def write_table(file: Path, labels: int = 2) -> Path:
    rows = [json.dumps({"text": f"row {number}", "label": f"class {number % labels}"}) for number in range(60)]
    file.write_text("\n".join(rows))
    return file


@pytest.mark.parametrize("name", ["rows.jsonl", "other rows.jsonl"])
def test_source_at_a_url_makes_the_dataset_of_the_file_and_is_told_without_its_secrets(
    tmp_path: Path, name: str
) -> None:
    counts = Counter[str]()
    file = write_table(tmp_path / name)
    here = prepare(PrepareOptions(str(file), str(tmp_path / "here"), label_column="label"), quiet)
    with web_of(tmp_path) as web:
        web.statuses[quote(name)] = [503]
        url = f"{web.url}/{quote(name)}?token=topsecret"
        command = PrepareOptions(url, str(tmp_path / "there"), label_column="label")
        there = prepare(command, lambda what, number: counts.update({what: number}))
    assert there.made_by is not None and there.made_by.source == redacted(url) and "topsecret" not in str(there)
    assert there.model_copy(update={"name": here.name, "made_by": here.made_by}) == here
    assert counts["bytes fetched"] == file.stat().st_size


@pytest.mark.slow
def test_folder_at_a_url_is_read_like_one_of_this_machine(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = prepare(options(texts, tmp_path / "here"), quiet)
    (tmp_path / "pictures" / "b").mkdir(parents=True)
    with s3_of(monkeypatch) as s3:
        s3.put(str(texts), "bucket/raw/texts", recursive=True)
        for source in ("s3://bucket/raw/texts", "s3://bucket/raw/texts/", texts.as_uri()):
            there = prepare(replace(options(texts, tmp_path / "there", overwrite=True), source=source), quiet)
            assert (there.slices, there.origin) == (here.slices, here.origin)
        s3.pipe("bucket/raw/pictures/red/1.png", b"no picture")
        with pytest.raises(ConfigError, match=r"PREP012.*images need --preprocessor"):
            prepare(PrepareOptions("s3://bucket/raw/pictures", str(tmp_path / "pictures")), quiet)


@pytest.mark.parametrize(
    ("place", "more", "text"),
    [
        ("none.jsonl?token=topsecret", {}, r"DATA010.*there is nothing at .*none\.jsonl"),
        ("", {}, r"PREP001.*--source is a folder of a web server.*name one, or download all of them"),
        ("rows.jsonl", {"label_column": "lable"}, r"DATA0.*URL/rows\.jsonl"),
        ("rows.jsonl", {"out": "full"}, r"PREP004.*already contains a dataset"),
    ],
)
def test_source_at_a_url_that_cannot_be_taken_is_one_error_that_names_it(
    tmp_path: Path, place: str, more: dict[str, Any], text: str
) -> None:
    write_table(tmp_path / "rows.jsonl")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text("{}")
    with web_of(tmp_path) as web:
        out = str(tmp_path / more.pop("out", "out"))
        with pytest.raises(HyphaError, match=text.replace("URL", re.escape(web.url))) as caught:
            prepare(PrepareOptions(f"{web.url}/{place}", out, **more), quiet)
        assert not web.fetched or "full" not in out, "what can be known before is refused before"
    assert "topsecret" not in str(caught.value) and "\n" not in str(caught.value)
    assert "/tmp" not in str(caught.value).replace(str(tmp_path), "")


@pytest.mark.slow
def test_dataset_prepared_at_a_url_is_that_of_a_folder_and_slices_do_not_stay_on_disk(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = prepare(options(texts, tmp_path / "words"), quiet)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "scratch").mkdir()
    most = []

    def count(what: str, number: int) -> None:
        most.append(len(list((tmp_path / "scratch").rglob("*.safetensors"))))

    with s3_of(monkeypatch) as s3:
        there = prepare(options(texts, "s3://bucket/data/words"), count)
        assert there == here and len(here.slices) > 50 and max(most) <= 1
        files = UrlFiles("s3://bucket/data/words", DiskCache(tmp_path / "cache"))
        assert files.manifest() == here and len([files.read(info) for info in here.slices]) == len(here.slices)
        assert files.preprocessor().keys() | {"manifest.json"} == FolderFiles(tmp_path / "words").preprocessor().keys()
        with pytest.raises(ConfigError, match=r"PREP004.*already contains a dataset"):
            prepare(options(texts, "s3://bucket/data/words"), quiet)
        fewer = prepare(options(texts, "s3://bucket/data/words", max_samples=40, overwrite=True), quiet)
        names = {str(name).rpartition("/")[2] for name in s3.find("bucket/data/words")}
        assert {name for name in names if name.endswith(".safetensors")} == {info.file for info in fewer.slices}
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_preparations_at_one_url_one_alone_writes_the_dataset(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """The second is refused; with overwrite it takes over, and the first is refused at its next slice."""
    url = "s3://bucket/words"
    outcomes: list[Any] = []

    def meanwhile(what: str, count: int) -> None:
        if what == "samples" and not outcomes:
            outcomes.append(None)
            try:
                outcomes[0] = prepare(options(texts, url, max_samples=40, overwrite=overwrite), quiet)
            except TryAgainError as error:
                outcomes[0] = error

    with s3_of(monkeypatch) as s3:
        try:
            first: Any = prepare(options(texts, url, max_samples=60), meanwhile)
        except TryAgainError as error:
            first = error
        done, refused = (outcomes[0], first) if overwrite else (first, outcomes[0])
        assert refused.code == "PREP016" and refused.exit_code == 75
        files = UrlFiles(url, DiskCache(tmp_path / "cache"))
        assert files.manifest() == done and all(files.read(info) for info in done.slices)
        assert not s3.exists("bucket/words/preparing")


@pytest.mark.slow
def test_url_that_a_killed_preparation_has_claimed_is_free_again_on_its_machine(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with s3_of(monkeypatch) as s3:
        for claim, is_free in ((f"{socket.gethostname()} {ended.pid} 0", True), (f"elsewhere {ended.pid} 0", False)):
            s3.pipe_file("bucket/words/preparing", claim.encode())
            if is_free:
                prepare(options(texts, "s3://bucket/words"), quiet)
                continue
            with pytest.raises(TryAgainError, match=r"PREP016.*elsewhere.*if it was killed, add --overwrite"):
                prepare(options(texts, "s3://bucket/words"), quiet)


@pytest.mark.parametrize(
    ("out", "code"), [("https://host/words", "CFG003"), ("nonsense://x/y", "CFG003"), ("gs://bucket/words", "DATA064")]
)
def test_url_that_cannot_be_written_is_refused_before_anything_is_read(texts: Path, out: str, code: str) -> None:
    with pytest.raises(HyphaError) as caught:
        prepare(options(texts, out), quiet)
    assert (caught.value.code, caught.value.exit_code) == (code, 2)


def test_parts_have_every_document_once_and_validation_in_the_first(texts: Path, tmp_path: Path) -> None:
    parts = [prepare(options(texts, tmp_path / f"{n}", part=f"{n}/3"), quiet) for n in range(3)]
    assert [manifest.part for manifest in parts] == [(0, 3), (1, 3), (2, 3)]
    assert [bool(manifest.of("validation")) for manifest in parts] == [True, False, False]
    for number, manifest in enumerate(parts):
        assert [info.index for info in manifest.slices] == [
            number * SLICES_PER_PART + n for n in range(len(manifest.slices))
        ]
    used = [manifest.origin.documents for manifest in parts if manifest.origin]
    left = [one.count for m in parts if m.origin for one in m.origin.omissions if one.reason == "of other parts"]
    assert used == [301] * 3 and sum(301 - count for count in left) == 301


@pytest.mark.parametrize("part", ["3/3", "1", "x/2", "-1/2", "0/0", "0/1001"])
def test_number_that_no_part_has_is_refused(texts: Path, tmp_path: Path, part: str) -> None:
    with pytest.raises(ConfigError, match=r"PREP001.*--part is out of range"):
        prepare(options(texts, tmp_path / "d", part=part), quiet)


def test_parts_of_samples_that_are_no_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"PREP007.*--part has no effect on images"):
        prepare(PrepareOptions("digits", str(tmp_path / "d"), part="0/2"), quiet)
