"""Copies of a run elsewhere, made beside its commits, and the way back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError, ConfigError, TryAgainError
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.mirror import Mirror, fetch
from hypha_ray.store.mirror_courier import Courier
from hypha_ray.store.restore_point import restart
from hypha_ray.store.snapshots import rounds
from tests.support.store_bench import LAYOUT, ask, flats, flip

URL, WAIT_S = "memory://away", 60.0


@pytest.fixture(params=["memory", "file", "plain"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A mirror's URL."""
    yield {"memory": "memory://mirror", "file": f"file://{tmp_path}/mirror/", "plain": f"{tmp_path}/mirror"}[
        request.param
    ]
    memory = fsspec.filesystem("memory")
    if memory.exists("/mirror"):
        memory.rm("/mirror", recursive=True)


def store(directory: Path, mirror: str | None, **checkpoint: int) -> CommitWriter:
    return CommitWriter(directory, Checkpoint(mirror=mirror, **checkpoint), 1000)


def run(directory: Path, mirror: str, number: int, **checkpoint: int) -> CommitWriter:
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text("[run]\n")
    kept = store(directory, mirror, **checkpoint)
    kept.begin(LAYOUT, *flats(0)[:2])
    for one in range(number):
        assert ask(kept, one, one + 1).problem is None
    return kept


def names(mirror: str) -> set[str]:
    """Files at a mirror."""
    fs, root = fsspec.core.url_to_fs(mirror)
    return {str(name).removeprefix(f"{root.rstrip('/')}/") for name in fs.find(root)}


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_mirror_fetched_is_the_run_itself_and_goes_on(tmp_path: Path, mirror: str) -> None:
    kept = run(tmp_path / "mine", mirror, 4)
    fetch(f"{mirror.rstrip('/')}/mine", tmp_path / "new" / "mine")
    assert contents(tmp_path / "new" / "mine") == contents(tmp_path / "mine")
    past = restart(tmp_path / "new" / "mine")
    assert past is not None and past.next_round == 4 and rounds(tmp_path / "new" / "mine") == [2, 3]
    again = store(tmp_path / "new" / "mine", None)
    assert ask(again, 4, 5).commit == ask(kept, 4, 5).commit


def test_mirror_has_records_between_snapshots_and_keeps_as_many_snapshots(tmp_path: Path, mirror: str) -> None:
    run(tmp_path / "mine", mirror, 8, every_rounds=3, keep=1)
    found = names(mirror)
    assert {name for name in found if "commits/round" in name} == {f"mine/commits/round_{n:06d}.json" for n in range(6)}
    assert {name.split("/")[2] for name in found if "checkpoints" in name} == {"round_000005"}
    assert "mine/config.toml" in found


def test_mirror_of_a_rewound_run_follows_it(tmp_path: Path, mirror: str) -> None:
    run(tmp_path / "mine", mirror, 4)
    flip(tmp_path / "mine" / "checkpoints" / "round_000003" / "model.safetensors")
    past = restart(tmp_path / "mine")
    assert past is not None
    past.rewind()
    ask(store(tmp_path / "mine", mirror), 3, 30)
    fetch(f"{mirror.rstrip('/')}/mine", tmp_path / "new")
    assert CommitLog(tmp_path / "new").read() == CommitLog(tmp_path / "mine").read()
    again = restart(tmp_path / "new")
    assert again is not None and again.next_round == 4 and again.state == {"seed": 30} and again.skipped == ()


def test_mirror_of_a_rewound_run_lacks_rounds_that_were_taken_back(tmp_path: Path, mirror: str) -> None:
    run(tmp_path / "mine", mirror, 5, every_rounds=2)
    CommitLog(tmp_path / "mine").set_aside(1)
    kept = store(tmp_path / "mine", mirror, every_rounds=2)
    ask(kept, 1, 10)
    assert {name for name in names(mirror) if "commits/round" in name} == {
        f"mine/commits/round_{number:06d}.json" for number in (0, 1)
    }
    fetch(f"{mirror.rstrip('/')}/mine", tmp_path / "new")
    past = restart(tmp_path / "new")
    assert past is not None and past.next_round == 2 and past.state == {"seed": 10}


@pytest.mark.parametrize("url", ["nonsense://mirror", "file:///dev/null/mirror"])
def test_mirror_that_fails_is_a_problem_and_no_end(tmp_path: Path, url: str) -> None:
    (tmp_path / "mine").mkdir()
    kept = store(tmp_path / "mine", url)
    first, *others = [ask(kept, number, number).problem for number in range(12)]  # More than the disk may refuse.
    assert first is not None and f"the copy of round 1 to {url} failed" in first and "\n" not in first
    assert others == [None] * 11, "it was told already"
    past = restart(tmp_path / "mine")
    assert past is not None and past.next_round == 12


def test_mirror_that_failed_for_a_while_catches_up(tmp_path: Path) -> None:
    (tmp_path / "mirror").write_text("a file where a folder should be")
    (tmp_path / "mine").mkdir()
    kept = store(tmp_path / "mine", str(tmp_path / "mirror"))
    assert [bool(ask(kept, number, number).problem) for number in range(3)] == [True, False, False]
    (tmp_path / "mirror").unlink()
    assert ask(kept, 3, 3).problem is None and kept.settle() is None
    fetch(f"{tmp_path}/mirror/mine", tmp_path / "new")
    assert CommitLog(tmp_path / "new").read() == CommitLog(tmp_path / "mine").read()


def test_mirror_problem_shows_no_password(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    problem = ask(store(tmp_path / "mine", "nonsense://me:secret@there/x"), 0, 1).problem
    assert problem is not None and "secret" not in problem and "nonsense://there/x" in problem


def test_fetch_again_changes_nothing_and_completes_what_was_interrupted(tmp_path: Path, mirror: str) -> None:
    run(tmp_path / "mine", mirror, 3)
    url, new = f"{mirror.rstrip('/')}/mine", tmp_path / "new"
    fetch(url, new)
    (new / "commits" / "round_000002.json").unlink()
    (new / "checkpoints" / "round_000002" / "outer.safetensors").unlink()
    fetch(url, new)
    assert contents(new) == contents(tmp_path / "mine")


def test_fetch_over_another_run_is_refused_and_changes_nothing(tmp_path: Path, mirror: str) -> None:
    run(tmp_path / "mine", mirror, 2)
    fetch(f"{mirror.rstrip('/')}/mine", tmp_path / "new")
    (tmp_path / "new" / "config.toml").write_text("[model]\n")
    before = contents(tmp_path / "new")
    with pytest.raises(CheckpointError, match=r"config\.toml is there already, with other contents"):
        fetch(f"{mirror.rstrip('/')}/mine", tmp_path / "new")
    assert contents(tmp_path / "new") == before


def test_fetch_takes_no_file_that_a_run_does_not_have(tmp_path: Path) -> None:
    run(tmp_path / "mine", str(tmp_path / "mirror"), 1)
    theirs = tmp_path / "mirror" / "mine"
    (theirs / "checkpoints" / "round_000000" / ".hidden").write_text("x")
    (theirs / "commits" / "evil.sh").write_text("x")
    fetch(str(theirs), tmp_path / "new")
    assert contents(tmp_path / "new") == contents(tmp_path / "mine")


def test_fetch_where_there_is_no_run_is_an_error(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(CheckpointError, match="there is no run at"):
        fetch(f"{mirror}/mine", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_fetch_from_what_cannot_be_read_asks_to_try_again(tmp_path: Path) -> None:
    with pytest.raises(TryAgainError, match=r"http://127.0.0.1:1/run\?token=\*\*\* can't be read") as caught:
        fetch("http://127.0.0.1:1/run?token=s3cret", tmp_path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "code"),
    [("nonsense://me:s3cret@there", "CFG003"), ("http://[::1/run", "CFG003"), ("ftp://host:port/run", "CFG003")],
)
def test_fetch_from_what_is_no_url_is_a_mistake_of_the_command(tmp_path: Path, url: str, code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fetch(url, tmp_path)
    assert caught.value.code == code
    assert "s3cret" not in str(caught.value)


def test_fetch_of_an_interrupted_copy_is_a_shorter_run(tmp_path: Path) -> None:
    """Whatever file was the last to be copied, what is there can be gone on from."""
    order: list[str] = []
    directory = tmp_path / "mine"
    kept = run(directory, str(tmp_path / "mirror"), 3)
    before: dict[str, bytes] = contents(tmp_path / "mirror")
    ask(kept, 3, 4)
    after = contents(tmp_path / "mirror")
    new = [name for name in after if name not in before]
    order = sorted(new, key=lambda name: ("commits" in name, "state.json" in name, name))
    for count in range(len(order)):
        partial: dict[str, Any] = {**before, **{name: after[name] for name in order[:count]}}
        place = tmp_path / f"partial-{count}"
        for name, data in partial.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        fetch(str(place / "mine"), tmp_path / f"new-{count}")
        past = restart(tmp_path / f"new-{count}")
        assert past is not None and past.next_round == 3


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
