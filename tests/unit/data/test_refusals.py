"""Object stores that refuse: each reason has its own remedy, on reads, on writes and in a mirror."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hypha_ray.data.catalogue import UrlFolder, load
from hypha_ray.data.storage import DiskCache, UrlFiles
from hypha_ray.errors import ExpiredError, HyphaError
from hypha_ray.store.mirror import Mirror, fetch
from tests.support.http_servers import LocalServer, QuietHandler
from tests.support.refusing_store import Store, refusing_store

REASONS = [
    ("expired as 400", "AUTH004", 4, "the credentials have expired", "renew them"),
    ("expired as 403", "AUTH004", 4, "the credentials have expired", "renew them"),
    ("skewed", "AUTH004", 4, "clock differs", "set this machine's clock"),
    ("unknown key", "AUTH004", 4, "doesn't know the access key", "AWS_ACCESS_KEY_ID"),
    ("wrong secret", "AUTH004", 4, "the secret key doesn't belong", "AWS_SECRET_ACCESS_KEY"),
    ("another region", "DATA066", 2, "another region", "AWS_DEFAULT_REGION"),
    ("denied", "AUTH004", 4, "is refused", "give this machine access"),
]


@pytest.mark.parametrize(("refusal", "code", "exit_code", "what", "fix"), REASONS)
def test_refusal_has_its_own_remedy_on_reads_and_writes(
    refusal: str, code: str, exit_code: int, what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"data")
    with refusing_store(monkeypatch) as store:
        store.refuses = refusal
        for request in (
            lambda: UrlFiles("s3://bucket/texts", DiskCache(tmp_path / "cache")).manifest(),
            lambda: UrlFolder("s3://bucket/texts").exists("manifest.json"),
            lambda: UrlFolder("s3://bucket/texts").put(file, "file"),
        ):
            with pytest.raises(HyphaError) as caught:
                request()
            error = caught.value
            assert (error.code, error.exit_code) == (code, exit_code), str(error)
            assert what in error.what and fix in error.fix
            assert "no dataset" not in str(error)


def test_store_that_refuses_checksums_is_told_apart_from_one_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"data")
    with refusing_store(monkeypatch) as store:
        store.refuses = "checksums"
        with pytest.raises(HyphaError) as caught:
            UrlFolder("s3://bucket/texts").put(file, "file")
        assert (caught.value.code, caught.value.exit_code) == ("DATA066", 2)
        assert "AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in caught.value.fix
        assert store.asked.count("PUT") < 10


@pytest.mark.slow
def test_new_credentials_are_found_by_the_folder_that_was_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_store(monkeypatch) as store:
        store.files = {f"bucket/texts/{file.name}": file.read_bytes() for file in corpus.iterdir() if file.is_file()}
        files = UrlFiles("s3://bucket/texts", DiskCache(tmp_path / "cache"))
        info = files.manifest().slices[0]
        store.refuses = "expired as 403"
        with pytest.raises(ExpiredError):
            files.read(info)
        store.refuses = ""
        assert files.read(info).keys() == {tensor.name for tensor in load(corpus).tensors}


@pytest.mark.slow
def test_folder_opens_a_new_file_system_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of S3 keep the credentials that they were opened with."""
    with refusing_store(monkeypatch) as store:
        store.refuses, folder = "expired as 400", UrlFolder("s3://bucket/texts")
        first, _ = folder._open()
        with pytest.raises(ExpiredError):
            folder.read("file")
        assert folder._open()[0] is not first


@pytest.mark.parametrize(
    ("refusal", "told"), [("expired as 403", "renew them"), ("checksums", "AWS_REQUEST_CHECKSUM_CALCULATION")]
)
def test_mirror_says_the_remedy(refusal: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "summary.json").write_text("{}")
    (directory / "config.toml").write_text("")
    with refusing_store(monkeypatch) as store:
        store.refuses = refusal
        problem = Mirror("s3://bucket/mirror", directory).complete()
        assert problem is not None and told in problem


@pytest.mark.parametrize(("refusal", "code", "exit_code", "what", "fix"), REASONS)
def test_refusal_of_a_mirror_to_resume_from_has_its_own_remedy(
    refusal: str, code: str, exit_code: int, what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refusing_store(monkeypatch) as store:
        store.refuses = refusal
        with pytest.raises(HyphaError) as caught:
            fetch("s3://bucket/mirror/run", tmp_path / "run")
    error = caught.value
    assert (error.code, error.exit_code) == (code, exit_code), str(error)
    assert what in error.what and fix in error.fix
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (401, "AUTH004", 4),
        (403, "AUTH004", 4),
        (407, "AUTH004", 4),
        (404, "STORE006", 5),
        (400, "STORE012", 5),
        (410, "STORE012", 5),
        (429, "STORE012", 75),
        (503, "STORE012", 75),
    ],
)
def test_mirror_over_http_is_tried_again_only_where_that_can_help(
    status: int, code: str, exit_code: int, tmp_path: Path
) -> None:
    with answering(status) as url, pytest.raises(HyphaError) as caught:
        fetch(f"{url}/mirror/run", tmp_path / "run")
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code), str(caught.value)
    assert not (tmp_path / "run").exists()


@contextmanager
def answering(status: int) -> Iterator[str]:
    """The URL of a server that answers every request with a status, and nothing else."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.answer(status)

        def do_HEAD(self) -> None:
            self.do_GET()

    with LocalServer(Handler) as server:
        yield server.url


def test_missing_dataset_is_still_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refusing_store(monkeypatch) as store:
        store.files = {"bucket/other": b""}
        with pytest.raises(HyphaError, match="there is no dataset at s3://bucket/texts") as caught:
            UrlFiles("s3://bucket/texts", DiskCache(tmp_path / "cache")).manifest()
        assert caught.value.code == "DATA001"
        assert isinstance(store, Store)
