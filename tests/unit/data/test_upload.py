"""Datasets that are prepared at a URL, and in parts."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.storage import DiskCache, FolderFiles, UrlFiles
from hypha_ray.errors import ConfigError, HyphaError, TryAgainError
from hypha_ray.types import SLICES_PER_PART
from tests.support.web import s3_of


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
