"""A disk that loses power: what nobody has waited for is gone, and what is said to be saved is there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import RunDirectory
from hypha_ray.store.mirror import Mirror, fetch
from hypha_ray.store.restore_point import restart
from hypha_ray.store.snapshots import load_snapshot
from tests.support.store_bench import LAYOUT, ask, flats


class ForgetfulDisk:
    """Remembers of each file the contents, and of each folder the names, that somebody has waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, set[str]] = {}
        real = os.fsync

        def fsync(descriptor: int) -> None:
            path, number = Path(f"/proc/self/fd/{descriptor}").resolve(), os.fstat(descriptor).st_ino
            if path.is_dir():
                self._names[number] = {one.name for one in path.iterdir()}
            else:
                self._contents[number] = path.read_bytes()
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def after_power_loss(self, folder: Path, copy: Path) -> Path:
        """A copy of a folder as it is found again."""
        kept = self._names.get(folder.stat().st_ino, set())
        copy.mkdir()
        for path in folder.iterdir():
            if path.name not in kept or path.is_symlink():
                continue
            if path.is_dir():
                self.after_power_loss(path, copy / path.name)
            else:
                (copy / path.name).write_bytes(self._contents.get(path.stat().st_ino, b""))
        return copy


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> ForgetfulDisk:
    return ForgetfulDisk(monkeypatch)


def test_what_the_store_has_answered_survives_a_loss_of_power(disk: ForgetfulDisk, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "r", "x = 1\n")
    store = CommitWriter(directory.path, Checkpoint(keep=1), 100)
    origin = store.begin(LAYOUT, *flats(9)[:2])
    for number in range(4):
        saved = ask(store, number, number + 1)
        assert saved.problem is None
        found = disk.after_power_loss(tmp_path / "runs", tmp_path / f"after-{number}") / "r"
        assert (found / "config.toml").read_text() == "x = 1\n"
        log = CommitLog(found).read()
        assert [commit.round for commit in log] == list(range(number + 1)) and log[-1] == saved.commit
        assert log[0].parent_sha256 == origin
        past = restart(found)
        assert past is not None and past.next_round == number + 1 and past.skipped == ()
        assert load_snapshot(found, number).state["scheduler"] == {"seed": number + 1}


def test_what_was_fetched_from_a_mirror_survives_a_loss_of_power(disk: ForgetfulDisk, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "r", "x = 1\n")
    store = CommitWriter(directory.path, Checkpoint(), 100)
    store.begin(LAYOUT, *flats(9)[:2])
    commits = [ask(store, number, number + 1).commit for number in range(2)]
    assert Mirror(str(tmp_path / "mirror"), directory.path).push(1, 2) is None
    fetch(str(tmp_path / "mirror" / "r"), tmp_path / "new" / "r")
    found = disk.after_power_loss(tmp_path / "new", tmp_path / "after") / "r"
    assert (found / "config.toml").read_text() == "x = 1\n" and list(CommitLog(found).read()) == commits
    past = restart(found)
    assert past is not None and past.next_round == 2


def test_file_that_nobody_has_waited_for_is_empty_then(disk: ForgetfulDisk, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").write_text("content")
    descriptor = os.open(tmp_path / "runs", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    (tmp_path / "runs" / "y").write_text("content")
    found = disk.after_power_loss(tmp_path / "runs", tmp_path / "after")
    assert {path.name: path.read_text() for path in found.iterdir()} == {"x": ""}
    shutil.rmtree(found)
