"""Names and contents that outlast a loss of power: names whose folder was synced after them, of files synced before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import RunDirectory, quarantine
from hypha_ray.store.mirror import fetch
from tests.support.store_bench import LAYOUT, ask, flats


class Disk:
    """Sees what the system is asked for, in order: names that are given, and what is synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.named: list[tuple[int, Path, Path | None]] = []
        """When, which name, and which name the file had before; None: it is a new folder."""
        self.synced: list[tuple[int, Path]] = []
        self._count = 0
        self._spy("mkdir", lambda path, *_: self.named.append((self._tick(), self._whole(path), None)))
        for call in ("rename", "replace", "link"):
            self._spy(call, lambda old, new: self.named.append((self._tick(), self._whole(new), self._whole(old))))
        self._spy("fsync", lambda file: self.synced.append((self._tick(), Path(f"/proc/self/fd/{file}").readlink())))

    def _spy(self, name: str, see: Callable[..., None]) -> None:
        call = getattr(os, name)

        def seen(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            see(*args)
            return result

        self._patch.setattr(os, name, seen)

    def _tick(self) -> int:
        self._count += 1
        return self._count

    @staticmethod
    def _whole(path: Any) -> Path:
        return Path(os.fspath(path)).absolute()

    def forgets(self) -> list[str]:
        """Names under which there may be nothing, or not all, after a loss of power."""
        lost = []
        for at, name, before in self.named:
            if not name.exists():
                continue  # It was for a while only.
            if not any(when > at and path == name.parent for when, path in self.synced):
                lost.append(f"the name of {name}")
            if before is not None and not any(when < at and path == before for when, path in self.synced):
                lost.append(f"the content of {name}")
        return lost


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def begun(directory: Path, rounds: int, **checkpoint: Any) -> CommitWriter:
    kept = CommitWriter(directory, Checkpoint(**checkpoint), 1000)
    kept.begin(LAYOUT, *flats(0)[:2])
    for number in range(rounds):
        ask(kept, number, number + 1)
    return kept


def test_new_run_and_its_commits_outlast_a_loss_of_power(tmp_path: Path, disk: Disk) -> None:
    directory = RunDirectory.create(tmp_path / "runs" / "deep", "mine", "x = 1\n")
    directory.begin_attempt()
    begun(directory.path, 3)
    assert len(disk.named) > 12 and disk.forgets() == []


def test_fresh_run_that_is_only_locked_yet_is_there_after_a_loss_of_power(tmp_path: Path, disk: Disk) -> None:
    with RunDirectory(tmp_path / "runs" / "mine").lock():
        assert disk.named and disk.forgets() == []


def test_records_that_are_set_aside_and_slices_in_quarantine_are_so_after_a_loss_of_power(
    tmp_path: Path, disk: Disk
) -> None:
    begun(tmp_path / "mine", 4)
    CommitLog(tmp_path / "mine").set_aside(1)
    quarantine(tmp_path / "mine", 3, "damaged")
    moved = [name for _, name, before in disk.named if "rewound" in str(name) and before is not None]
    assert len(moved) == 3
    assert [line for line in disk.forgets() if "content" not in line or "rewound" not in line] == []


def test_run_that_was_fetched_from_its_mirror_outlasts_a_loss_of_power(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.toml").write_text("[run]\n")
    assert begun(tmp_path / "mine", 2, mirror=str(tmp_path / "mirror")).settle() is None
    disk.named.clear()
    fetch(str(tmp_path / "mirror" / "mine"), tmp_path / "new" / "mine")
    assert len(disk.named) > 10 and disk.forgets() == []
