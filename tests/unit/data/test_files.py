"""Datasets at URLs, on real servers of this machine: what is read, how often, and what is said if it can't be."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import s3fs

from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import Arrays
from hypha_ray.data.storage import DiskCache, FolderFiles, UrlFiles, preprocessor_files
from hypha_ray.errors import HyphaError
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
