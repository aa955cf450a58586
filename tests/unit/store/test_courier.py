"""A mirror that hangs, fails for a while, or has seen many rounds: commits are made beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hypha_ray.config.training import Checkpoint
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.mirror import Mirror, fetch
from hypha_ray.store.mirror_courier import Courier
from hypha_ray.store.snapshots import rounds
from tests.support.store_bench import LAYOUT, ask, flats

URL, WAIT_S = "memory://away", 60.0


class Gate:
    """A file system elsewhere that lets nothing through while it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.put, self.come = threading.Event(), list[str](), threading.Event()
        put = MemoryFileSystem.put_file

        def slowly(fs: Any, lpath: str, rpath: str, *args: Any, **options: Any) -> Any:
            self.put.append(rpath)
            self.come.set()
            assert self.opened.wait(WAIT_S)
            return put(fs, lpath, rpath, *args, **options)

        monkeypatch.setattr(MemoryFileSystem, "put_file", slowly)

    def rounds(self) -> set[str]:
        """Snapshots of which something was sent."""
        return {name.split("/")[-2] for name in self.put if "checkpoints" in name}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()
    memory = fsspec.filesystem("memory")
    if memory.exists("/away"):
        memory.rm("/away", recursive=True)


def keeper_of(directory: Path, **checkpoint: int) -> CommitWriter:
    directory.mkdir()
    (directory / "config.toml").write_text("[run]\n")
    kept = CommitWriter(directory, Checkpoint(mirror=URL, **checkpoint), 1000)
    kept.begin(LAYOUT, *flats(0)[:2])
    return kept


def test_commits_are_made_beside_a_mirror_that_hangs_and_the_newest_is_copied_when_it_answers(
    tmp_path: Path, gate: Gate
) -> None:
    kept = keeper_of(tmp_path / "mine")
    assert [ask(kept, number, number + 1).problem for number in range(6)] == [None] * 6
    assert CommitLog(tmp_path / "mine").rounds() == list(range(6)) and gate.rounds() <= {"round_000000"}
    gate.opened.set()
    assert kept.settle() is None
    assert gate.rounds() == {"round_000000", "round_000005"}, "what is old by now is copied"
    fetch(f"{URL}/mine", tmp_path / "new")
    assert CommitLog(tmp_path / "new").read() == CommitLog(tmp_path / "mine").read()


def test_snapshot_that_is_being_copied_stays_so_long(tmp_path: Path, gate: Gate) -> None:
    kept = keeper_of(tmp_path / "mine", keep=1)
    ask(kept, 0, 1)
    assert gate.come.wait(WAIT_S)
    for number in range(1, 4):
        ask(kept, number, number + 1)
    assert rounds(tmp_path / "mine") == [0, 3]
    gate.opened.set()
    assert kept.settle() is None and rounds(tmp_path / "mine") == [3]


def test_copy_that_takes_too_long_is_told_once_and_waited_for_no_longer(tmp_path: Path, gate: Gate) -> None:
    kept = CommitWriter(tmp_path / "mine", Checkpoint(), 1000)
    for number in range(2):
        ask(kept, number, number + 1)
    courier = Courier(Mirror("memory://me:secret@away", tmp_path / "mine"), wait_s=0.01, deadline_s=0.0)
    courier.send(0, 1)
    assert gate.come.wait(WAIT_S)
    assert courier.settle() == "the copy of round 1 to memory://away doesn't end; training goes on"
    courier.send(1, 1)
    assert (courier.news(), courier.settle()) == (None, None)


def test_mirror_that_fails_again_after_something_has_arrived_is_told_of_again(tmp_path: Path) -> None:
    place = tmp_path / "mirror"
    (tmp_path / "mine").mkdir()
    kept = CommitWriter(tmp_path / "mine", Checkpoint(mirror=str(place)), 1000)
    told: list[bool] = []
    for number, there in enumerate((True, False, False, True, False)):
        if place.is_file() and there:
            place.unlink()
        if not there and place.is_dir():
            place.rename(tmp_path / f"former-{number}")
        if not there and not place.exists():
            place.write_text("a file where a folder should be")
        told.append(ask(kept, number, number).problem is not None or kept.settle() is not None)
    assert told == [False, True, False, False, True]


def test_mirror_is_listed_once_however_many_rounds_there_are(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.opened.set()
    listed: list[str] = []
    find: Callable[..., Any] = MemoryFileSystem.find
    monkeypatch.setattr(
        MemoryFileSystem,
        "find",
        lambda fs, path, *rest, **options: (listed.append(path), find(fs, path, *rest, **options))[1],
    )
    kept = keeper_of(tmp_path / "mine")
    for number in range(12):
        assert ask(kept, number, number + 1).problem is None
        assert kept.settle() is None
    assert listed.count("/away/mine") == 1
    assert len([name for name in gate.put if "commits/" in name]) == 12, "a record is copied twice"


def test_mirror_has_history_and_results_and_the_way_back_brings_the_history(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    mine = tmp_path / "mine"
    kept = keeper_of(mine)
    (mine / "metrics.jsonl").write_text("1\n")
    (mine / "events.jsonl").write_text("2\n")
    ask(kept, 0, 1)
    assert kept.settle() is None
    fetch(f"{URL}/mine", tmp_path / "early")
    assert (tmp_path / "early" / "metrics.jsonl").read_text() == "1\n"
    (mine / "metrics.jsonl").write_text("1\n2\n")
    ask(kept, 1, 2)
    assert kept.settle() is None
    fetch(f"{URL}/mine", tmp_path / "second")
    assert (tmp_path / "second" / "metrics.jsonl").read_text() == "1\n2\n"
    (mine / "metrics.jsonl").write_text("1\n1\n")
    (mine / "summary.json").write_text("{}")
    (mine / "model" / "deep").mkdir(parents=True)
    (mine / "model" / "model.safetensors").write_text("weights")
    (mine / "model" / "deep" / "file").write_text("more")
    assert Mirror(URL, mine).complete() is None
    there = fsspec.filesystem("memory")
    for name in ("metrics.jsonl", "events.jsonl", "summary.json", "model/model.safetensors", "model/deep/file"):
        assert there.cat_file(f"/away/mine/{name}") == (mine / name).read_bytes()
    fetch(f"{URL}/mine", tmp_path / "late")
    assert (tmp_path / "late" / "metrics.jsonl").read_text() == "1\n1\n" and not (tmp_path / "late" / "model").exists()
    fetch(f"{URL}/mine", tmp_path / "early")
    assert (tmp_path / "early" / "metrics.jsonl").read_text() == "1\n", "what has gone on here is kept"
