"""A store that dies at any operation leaves the old state or the new one; what was saved outlasts a loss of power."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.failpoints import hits
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.directory import RunDirectory, quarantine
from hypha_ray.store.mirror import Mirror, fetch
from hypha_ray.store.restore_point import restart
from hypha_ray.store.snapshots import load_snapshot
from tests.support.store_bench import LAYOUT, armed, ask, flats

PLACES = [
    ("before_snapshot", 1, False),
    *(("write", hit, False) for hit in range(1, 7)),
    ("after_weights", 1, False),
    ("before_publish", 1, False),
    ("before_record", 1, False),
    ("before_link", 1, False),
    ("after_record", 1, True),
]
"""Each with whether the round is committed by then; the sixth write is that of the record."""

COMMIT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.store_bench import ask
from hypha_ray.config.training import Checkpoint
from hypha_ray.failpoints import arm
from hypha_ray.store.commit_writer import CommitWriter
arm([sys.argv[4]], sys.argv[3])
ask(CommitWriter(Path(sys.argv[2]), Checkpoint(), 9), 1, 2)
"""


def store(directory: Path) -> CommitWriter:
    return CommitWriter(directory, Checkpoint(), 9)


def old_or_new(directory: Path, committed: bool) -> None:
    """What a restart sees; then a store that is asked again brings it to an end."""
    past = restart(directory)
    assert past is not None and past.next_round == 1 + committed
    assert past.state == {"seed": 1 + committed} and past.skipped == ()
    assert ask(store(directory), 1, 2).problem is None
    past = restart(directory)
    assert past is not None and past.next_round == 2 and past.state == {"seed": 2}
    check_chain(CommitLog(directory).read())
    assert [path.name for path in directory.glob("*/*") if path.suffix == ".tmp"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("point", "hit", "committed"), PLACES)
def test_store_killed_at_a_disk_operation_leaves_old_or_new(
    tmp_path: Path, point: str, hit: int, committed: bool
) -> None:
    ask(store(tmp_path / "run"), 0, 1)
    log, spec = tmp_path / "hits.jsonl", f"store.{point}=kill@{hit}"
    command = [sys.executable, "-c", COMMIT, str(Path(__file__).parents[3]), str(tmp_path / "run"), str(log), spec]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert hits(log, f"store.{point}") == 1
    old_or_new(tmp_path / "run", committed)


@pytest.mark.parametrize(("point", "hit", "committed"), PLACES)
def test_store_that_fails_unexpectedly_leaves_old_or_new(tmp_path: Path, point: str, hit: int, committed: bool) -> None:
    ask(store(tmp_path / "run"), 0, 1)
    with armed(tmp_path / "hits", f"store.{point}=error@{hit}"), pytest.raises(RuntimeError, match="a failpoint"):
        ask(store(tmp_path / "run"), 1, 2)
    old_or_new(tmp_path / "run", committed)


@pytest.mark.parametrize(("point", "hit", "committed"), PLACES)
def test_store_asked_again_after_an_unexpected_failure_completes_the_round(
    tmp_path: Path, point: str, hit: int, committed: bool
) -> None:
    same = store(tmp_path / "run")
    ask(same, 0, 1)
    with armed(tmp_path / "hits", f"store.{point}=error@{hit}"), pytest.raises(RuntimeError, match="a failpoint"):
        ask(same, 1, 2)
    assert ask(same, 1, 2).problem is None and ask(same, 2, 3).problem is None
    past = restart(tmp_path / "run")
    assert past is not None and past.next_round == 3 and past.skipped == ()


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
def forgetful(monkeypatch: pytest.MonkeyPatch) -> ForgetfulDisk:
    return ForgetfulDisk(monkeypatch)


def test_what_the_store_has_answered_survives_a_loss_of_power(forgetful: ForgetfulDisk, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "r", "x = 1\n")
    store = CommitWriter(directory.path, Checkpoint(keep=1), 100)
    origin = store.begin(LAYOUT, *flats(9)[:2])
    for number in range(4):
        saved = ask(store, number, number + 1)
        assert saved.problem is None
        found = forgetful.after_power_loss(tmp_path / "runs", tmp_path / f"after-{number}") / "r"
        assert (found / "config.toml").read_text() == "x = 1\n"
        log = CommitLog(found).read()
        assert [commit.round for commit in log] == list(range(number + 1)) and log[-1] == saved.commit
        assert log[0].parent_sha256 == origin
        past = restart(found)
        assert past is not None and past.next_round == number + 1 and past.skipped == ()
        assert load_snapshot(found, number).state["scheduler"] == {"seed": number + 1}


def test_what_was_fetched_from_a_mirror_survives_a_loss_of_power(forgetful: ForgetfulDisk, tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "r", "x = 1\n")
    store = CommitWriter(directory.path, Checkpoint(), 100)
    store.begin(LAYOUT, *flats(9)[:2])
    commits = [ask(store, number, number + 1).commit for number in range(2)]
    assert Mirror(str(tmp_path / "mirror"), directory.path).push(1, 2) is None
    fetch(str(tmp_path / "mirror" / "r"), tmp_path / "new" / "r")
    found = forgetful.after_power_loss(tmp_path / "new", tmp_path / "after") / "r"
    assert (found / "config.toml").read_text() == "x = 1\n" and list(CommitLog(found).read()) == commits
    past = restart(found)
    assert past is not None and past.next_round == 2


def test_file_that_nobody_has_waited_for_is_empty_then(forgetful: ForgetfulDisk, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").write_text("content")
    descriptor = os.open(tmp_path / "runs", os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    (tmp_path / "runs" / "y").write_text("content")
    found = forgetful.after_power_loss(tmp_path / "runs", tmp_path / "after")
    assert {path.name: path.read_text() for path in found.iterdir()} == {"x": ""}
    shutil.rmtree(found)


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
