"""Files of a directory that somebody else writes to as well: what is read is what was announced, or nothing."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypha_ray.bridge.bridge_pb2 import Content
from hypha_ray.bridge.paths import WorkDirectory, split_path
from hypha_ray.errors import BridgeError, TryAgainError

CONTENT = b"weights" * 1000
EXPECTED = Content(size=len(CONTENT), sha256=hashlib.sha256(CONTENT).digest())


@pytest.fixture
def work(tmp_path: Path) -> Iterator[WorkDirectory]:
    (tmp_path / "work" / "updates").mkdir(parents=True)
    directory = WorkDirectory(tmp_path / "work")
    directory.path.joinpath("updates/good").write_bytes(CONTENT)
    yield directory
    directory.close()


def copy(work: WorkDirectory, path: str, expected: Content = EXPECTED) -> bytes:
    target = work.path.parent / "copy"
    try:
        work.copy(path, expected, target)
    except Exception:
        assert not target.exists()
        raise
    return target.read_bytes()


def test_file_is_copied(work: WorkDirectory) -> None:
    assert copy(work, "updates/good") == CONTENT


def test_copy_stays_what_it_was_when_the_file_changes(work: WorkDirectory) -> None:
    copied = copy(work, "updates/good")
    work.path.joinpath("updates/good").write_bytes(b"other")
    assert work.path.parent.joinpath("copy").read_bytes() == copied


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../../x",
        "updates/../../x",
        "updates/..",
        "./updates/good",
        "updates/./good",
        "updates//good",
        "updates/good/",
        "updates\\good",
        "C:\\x",
        "C:x",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "a\u2028b",
        "\ud800",
        "x" * 5000,
        "x/" * 300 + "x",
        "ü" * 257,
        "n" * 256,
    ],
)
def test_path_that_is_not_a_plain_one_is_refused(path: str, work: WorkDirectory) -> None:
    with pytest.raises(BridgeError, match=r"PATH001"):
        split_path(path)
    with pytest.raises(BridgeError, match=r"PATH001"):
        copy(work, path)


@pytest.mark.parametrize("path", ["a", "updates/round_000012.safetensors", "...", "a b", "größe", "n" * 255])
def test_plain_path_is_taken_apart(path: str) -> None:
    assert "/".join(split_path(path)) == path


def test_links_are_not_followed(work: WorkDirectory) -> None:
    secret = work.path.parent / "secret"
    secret.write_bytes(CONTENT)
    (work.path / "updates/link").symlink_to(secret)
    (work.path / "updates/near").symlink_to("good")
    (work.path / "folder").symlink_to(work.path / "updates")
    (work.path / "loop").symlink_to("loop")
    for path in ("updates/link", "updates/near", "folder/good", "loop", "loop/x"):
        with pytest.raises(BridgeError, match=r"PATH002.*leads over a link"):
            copy(work, path)


def test_what_is_no_regular_file_of_ours_alone_is_refused_at_once(work: WorkDirectory) -> None:
    os.mkfifo(work.path / "fifo")
    (work.path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(work.path / "socket"))
    os.link(work.path / "updates/good", work.path / "second")
    for path, found in (("fifo", "FIFO"), ("folder", "directory"), ("socket", "socket"), ("second", "2 names")):
        with pytest.raises(BridgeError, match=rf"PATH003.*{found}"):
            copy(work, path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices")
def test_device_is_refused(work: WorkDirectory) -> None:
    os.mknod(work.path / "zero", 0o20666, os.makedev(1, 5))
    with pytest.raises(BridgeError, match=r"PATH003.*a device"):
        copy(work, "zero")


def test_missing_files_and_folders_are_said_to_be_missing(work: WorkDirectory) -> None:
    for path in ("absent", "updates/absent", "absent/good", "updates/good/x"):
        with pytest.raises(BridgeError, match=r"PATH006"):
            copy(work, path)


@pytest.mark.parametrize("size", [0, 1, len(CONTENT) - 1, len(CONTENT) + 1, 2**63])
def test_file_of_another_size_is_refused(size: int, work: WorkDirectory) -> None:
    with pytest.raises(BridgeError, match=r"PATH004"):
        copy(work, "updates/good", Content(size=size, sha256=EXPECTED.sha256))


def test_file_of_another_content_is_refused(work: WorkDirectory) -> None:
    changed = b"x" + CONTENT[1:]
    work.path.joinpath("updates/good").write_bytes(changed)
    with pytest.raises(BridgeError, match=r"PATH005.*isn't the announced file"):
        copy(work, "updates/good")


def test_file_that_shrinks_or_grows_while_it_is_read_is_refused(work: WorkDirectory) -> None:
    size = 3 << 20
    path = work.path / "updates/big"
    expected = Content(size=size, sha256=hashlib.sha256(bytes(size)).digest())
    real = hashlib.sha256
    for change in (100, 2 * size):
        path.write_bytes(bytes(size))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BridgeError, match=r"PATH005"):
            patch.setattr(hashlib, "sha256", lambda length=change: os.truncate(path, length) or real())
            copy(work, "updates/big", expected)


def test_swapping_a_folder_for_a_link_gives_the_file_or_an_error_but_never_another_file(work: WorkDirectory) -> None:
    outside = work.path.parent / "outside"
    outside.mkdir()
    (outside / "good").write_bytes(b"secret!" * 1000)
    ended = threading.Event()

    def swap() -> None:
        while not ended.is_set():
            (work.path / "updates").rename(work.path / "aside")
            (work.path / "updates").symlink_to(outside)
            (work.path / "updates").unlink()
            (work.path / "aside").rename(work.path / "updates")

    swapping = threading.Thread(target=swap)
    swapping.start()
    outcomes, tries, deadline = set[str](), 0, time.monotonic() + 20
    try:
        while tries < 2000 or ("file" not in outcomes and time.monotonic() < deadline):
            tries += 1
            try:
                with work.open("updates/good", len(CONTENT)) as file:
                    assert file.read(7) == b"weights"
                outcomes.add("file")
            except BridgeError as error:
                outcomes.add(error.code)
    finally:
        ended.set()
        swapping.join()
    assert "file" in outcomes and outcomes <= {"file", "PATH002", "PATH006"}


def test_new_file_is_ours_alone_and_never_written_over(work: WorkDirectory) -> None:
    with work.create("updates/new") as file:
        file.write(b"content")
    assert (work.path / "updates/new").read_bytes() == b"content"
    assert (work.path / "updates/new").stat().st_mode & 0o777 == 0o600
    (work.path / "link").symlink_to("absent")
    for path in ("updates/new", "link"):
        with pytest.raises(BridgeError, match=r"PATH007"), work.create(path):
            pass


def test_file_that_was_not_received_whole_is_gone(work: WorkDirectory) -> None:
    with pytest.raises(BridgeError, match=r"FRM008"), work.create("updates/half"):
        raise BridgeError("FRM008", "gone")
    with pytest.raises(TryAgainError, match=r"PATH010.*No space"), work.create("updates/half"):
        raise OSError(28, "No space left on device")
    assert not (work.path / "updates/half").exists()


def test_no_descriptor_is_left_open(work: WorkDirectory) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in ("updates/good", "updates/absent", "absent/x", "..", "updates"):
        for _ in range(50):
            try:
                copy(work, path).decode()
                (work.path.parent / "copy").unlink()
            except BridgeError:
                pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
