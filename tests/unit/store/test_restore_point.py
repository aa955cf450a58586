"""What a run goes on from, whatever happened to its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError
from hypha_ray.scheduler.ledger import Ledger
from hypha_ray.store.commit_writer import CommitWriter
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.disk import sealed
from hypha_ray.store.restore_point import RestorePoint, restart
from hypha_ray.types import Entry, Flat, Layout, SliceInfo
from tests.support.store_bench import GROUP, LAYOUT, PARTS, WORKERS, ask, flats, flip, inner_state, persist

LARGE = Layout((Entry("a", "float32", (60, 100), 0, GROUP, 0, 6000),))


def run(directory: Path, rounds: int, **checkpoint: int) -> Path:
    store = CommitWriter(directory, Checkpoint(**checkpoint), 1000)
    for number in range(rounds):
        ask(store, number, number + 1)
    return directory


def snapshot(directory: Path, number: int) -> Path:
    return directory / "checkpoints" / f"round_{number:06d}"


def found(directory: Path) -> RestorePoint:
    past = restart(directory)
    assert past is not None
    return past


def test_restart_gives_everything_of_the_newest_round(tmp_path: Path) -> None:
    past = found(run(tmp_path, 3))
    assert (past.next_round, past.state, past.skipped) == (3, {"seed": 3}, ())
    newest = CommitLog(tmp_path).newest()
    assert newest is not None and past.theta_sha256 == newest.theta_sha256
    assert past.layout_sha256 == LAYOUT.sha256() and past.layout == LAYOUT
    expected: list[Flat] = [*flats(3), *(inner_state(worker, 3) for worker in WORKERS)]
    for flat, other in zip(past.flats(LAYOUT), expected, strict=True):
        assert flat.keys() == other.keys() and all(np.array_equal(flat[name], other[name]) for name in flat)
    assert past.outline() == replace(past, theta={}, outer={}, inner={0: {}, 3: {}})


@pytest.mark.parametrize("entries", [None, [["a", "float32", [3, 2], 0, GROUP, 0, 6]]])
def test_restart_from_a_snapshot_without_the_right_places_has_no_layout(entries: object, tmp_path: Path) -> None:
    label = snapshot(run(tmp_path, 2), 1) / "state.json"
    content = json.loads(label.read_text())
    del content["checksum"], content["state"]["entries"]
    if entries is not None:
        content["state"]["entries"] = entries
    label.write_bytes(sealed(content))
    past = found(tmp_path)
    assert past.layout is None and past.next_round == 2 and not past.skipped


def test_restart_of_a_run_without_a_commit_is_none(tmp_path: Path) -> None:
    assert restart(tmp_path) is None
    CommitWriter(tmp_path, Checkpoint(), 9).begin(LAYOUT, *flats(1)[:2])
    assert restart(tmp_path) is None


@pytest.mark.parametrize("rounds", range(1, 6))
def test_restart_used_samples_restore_the_ledger_that_the_commits_made(tmp_path: Path, rounds: int) -> None:
    past = found(run(tmp_path, rounds))
    slices = [SliceInfo(index, f"{index}", "0" * 64, 4) for index in (0, 1)]
    ledger = Ledger.restore(slices, 1, {"epoch": past.epoch, "used": past.used})
    last = persist(rounds - 1, 0)
    assert (ledger.epoch, ledger.cursors()) == (last.epoch, last.cursors)
    assert 8 * ledger.epoch + sum(ledger.cursors().values()) == 4 * rounds


@pytest.mark.parametrize("name", PARTS)
def test_restart_with_a_flipped_bit_uses_the_round_before_and_says_so(tmp_path: Path, name: str) -> None:
    run(tmp_path, 3)
    path = snapshot(tmp_path, 2) / name
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        flip(path, place / len(data))
        past = found(tmp_path)
        assert past.next_round == 2 and past.state == {"seed": 2}
        assert past.skipped == (f"checkpoint round 3: {name} has other bytes than were written; using round 2",)
        path.write_bytes(data)
    assert found(tmp_path).next_round == 3


def test_restart_with_a_file_truncated_at_any_4_kib_boundary_uses_the_round_before(tmp_path: Path) -> None:
    store = CommitWriter(tmp_path, Checkpoint(), 1000)
    rng = np.random.default_rng(0)
    for number in range(2):
        arrays: list[Flat] = [{GROUP: rng.standard_normal(6000, dtype=np.float32)} for _ in range(2)]
        store.commit(persist(number, number), LARGE, (), *arrays)
    for name in ("model.safetensors", "outer.safetensors", "state.json"):
        path = snapshot(tmp_path, 1) / name
        data = path.read_bytes()
        for length in range(0, len(data), 4096):
            path.write_bytes(data[:length])
            past = found(tmp_path)
            assert past.next_round == 1 and name in past.skipped[0]
        path.write_bytes(data)
    assert found(tmp_path).next_round == 2


@pytest.mark.parametrize("name", PARTS)
def test_restart_with_a_file_missing_uses_the_round_before(tmp_path: Path, name: str) -> None:
    run(tmp_path, 2)
    (snapshot(tmp_path, 1) / name).unlink()
    past = found(tmp_path)
    assert past.next_round == 1
    assert past.skipped == (f"checkpoint round 2: {name} is missing; using round 1",)


def test_restart_with_a_snapshot_that_was_never_renamed_removes_it_and_uses_the_round_before(tmp_path: Path) -> None:
    run(tmp_path, 2)
    snapshot(tmp_path, 1).rename(snapshot(tmp_path, 1).with_suffix(".tmp"))
    (tmp_path / "commits" / "round_000002.0123.tmp").write_bytes(b"half")
    past = found(tmp_path)
    assert past.next_round == 1 and past.skipped == ("commit round 2: no checkpoint; using round 1",)
    assert list(tmp_path.glob("*/*.tmp")) == []


def test_restart_with_the_snapshot_of_other_weights_uses_the_round_before(tmp_path: Path) -> None:
    run(tmp_path / "mine", 2)
    other = CommitWriter(tmp_path / "other", Checkpoint(), 9)
    for number in range(2):
        ask(other, number, 77)
    snapshot(tmp_path / "mine", 1).rename(tmp_path / "aside")
    snapshot(tmp_path / "other", 1).rename(snapshot(tmp_path / "mine", 1))
    past = found(tmp_path / "mine")
    assert past.next_round == 1
    assert past.skipped == ("checkpoint round 2: it isn't the one that the commit names; using round 1",)


def test_restart_between_two_snapshots_rewinds_the_rounds_after(tmp_path: Path) -> None:
    past = found(run(tmp_path, 5, every_rounds=3))
    assert past.next_round == 3 and past.skipped == ("commit round 4-5: no checkpoint; using round 3",)
    log = CommitLog(tmp_path)
    assert log.rounds() == [0, 1, 2, 3, 4]
    past.rewind()
    past.rewind()
    assert log.rounds() == [0, 1, 2]
    assert sorted(path.name for path in (tmp_path / "commits" / "rewound" / "1").iterdir()) == [
        "round_000003.json",
        "round_000004.json",
    ]
    store = CommitWriter(tmp_path, Checkpoint(), 1000)
    store.begin(LAYOUT, *past.flats(LAYOUT)[:2])
    assert ask(store, 3, 30).problem is None


def test_restart_with_a_damaged_newest_record_counts_it_as_absent_and_sets_it_aside(tmp_path: Path) -> None:
    run(tmp_path, 3)
    flip(CommitLog(tmp_path).path(2))
    past = found(tmp_path)
    assert past.next_round == 2
    assert past.skipped == ("commit round 3: its record is damaged and counts as absent",)
    past.rewind()
    assert ask(CommitWriter(tmp_path, Checkpoint(), 1000), 2, 3).problem is None
    assert found(tmp_path).next_round == 3


def test_restart_with_the_only_record_damaged_starts_anew(tmp_path: Path) -> None:
    run(tmp_path, 1)
    flip(CommitLog(tmp_path).path(0))
    assert restart(tmp_path) is None
    assert ask(CommitWriter(tmp_path, Checkpoint(), 1000), 0, 9).problem is None


@pytest.mark.parametrize("missing", [True, False])
def test_restart_with_a_bad_record_in_the_middle_is_refused(tmp_path: Path, missing: bool) -> None:
    run(tmp_path, 4)
    path = CommitLog(tmp_path).path(1)
    path.unlink() if missing else flip(path)
    with pytest.raises(CheckpointError) as caught:
        restart(tmp_path)
    assert caught.value.exit_code == 5 and len(CommitLog(tmp_path).rounds()) == 4 - missing


def test_restart_without_any_good_snapshot_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path, 3)
    for number in (1, 2):
        flip(snapshot(tmp_path, number) / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"can be used.*round 3: model.*round 2: model") as caught:
        restart(tmp_path)
    assert caught.value.exit_code == 5 and CommitLog(tmp_path).rounds() == [0, 1, 2]


def test_restart_with_a_newer_format_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 2)
    state = snapshot(tmp_path, 1) / "state.json"
    record = {key: value for key, value in json.loads(state.read_text()).items() if key != "checksum"}
    state.write_bytes(sealed({**record, "format": 99}))
    with pytest.raises(CheckpointError, match="got format 99, allowed format 1"):
        restart(tmp_path)


def test_restart_leaves_foreign_files_alone_and_names_them(tmp_path: Path) -> None:
    run(tmp_path, 2)
    (tmp_path / "commits" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "best").mkdir()
    past = found(tmp_path)
    past.rewind()
    assert past.next_round == 2
    assert past.skipped == ("commits/notes.txt: none of ours, left alone", "checkpoints/best: none of ours, left alone")
    assert (tmp_path / "commits" / "notes.txt").exists() and (tmp_path / "checkpoints" / "best").exists()


def test_restart_for_another_model_names_the_tensor_that_differs(tmp_path: Path) -> None:
    past = found(run(tmp_path, 1))
    entries = (LAYOUT.entries[0], Entry("b", "float32", (8,), 1, GROUP, 0, 8))
    with pytest.raises(CheckpointError, match=r"another model: b differs — got shape \(8,\), allowed shape \(4,\)"):
        past.flats(Layout(entries, (), 2))
    with pytest.raises(CheckpointError, match="another model: c differs"):
        past.flats(Layout((*LAYOUT.entries, Entry("c", "float32", (1,), 1, GROUP, 4, 1)), (), 2))


def test_restart_into_another_number_of_fragments_keeps_every_tensor(tmp_path: Path) -> None:
    past = found(run(tmp_path, 1))
    one = Layout((LAYOUT.entries[0], Entry("b", "float32", (4,), 0, GROUP, 6, 4)))
    a, b, *_ = flats(1)
    assert np.array_equal(past.flats(one)[0][GROUP], np.concatenate([a[GROUP], b[GROUP]]))
    CommitWriter(tmp_path, Checkpoint(), 9).begin(one, past.flats(one)[0])
