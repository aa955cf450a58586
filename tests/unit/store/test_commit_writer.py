"""What the store answers: repeated commits, a full disk, inner states, and which snapshots stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.config.training import Checkpoint
from hypha_ray.errors import CheckpointError, TryAgainError
from hypha_ray.store.commit_writer import CommitWriter, Evaluations
from hypha_ray.store.commits import CommitLog, check_chain
from hypha_ray.store.restore_point import restart
from hypha_ray.store.snapshots import flattened, load_snapshot, named, rounds
from tests.support.store_bench import LAYOUT, PARTS, armed, ask, flats, inner_state, persist


def keeper(directory: Path, update_rounds: int = 100, **checkpoint: int) -> CommitWriter:
    return CommitWriter(directory, Checkpoint(**checkpoint), update_rounds)


def test_keeper_commit_again_after_its_process_died_gives_the_same_record(tmp_path: Path) -> None:
    first = ask(keeper(tmp_path), 0, 1)
    before = (tmp_path / "checkpoints" / "round_000000" / "state.json").stat().st_mtime_ns
    assert ask(keeper(tmp_path), 0, 1) == first
    assert (tmp_path / "checkpoints" / "round_000000" / "state.json").stat().st_mtime_ns == before
    assert CommitLog(tmp_path).read() == (first.commit,)


def test_keeper_commit_again_with_other_weights_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = keeper(tmp_path)
    first = ask(store, 0, 1)
    for other in (store, keeper(tmp_path)):
        with pytest.raises(CheckpointError, match="round 1 is committed already, with another outcome"):
            ask(other, 0, 2)
    assert CommitLog(tmp_path).read() == (first.commit,) and load_snapshot(tmp_path, 0).state["scheduler"] == {
        "seed": 1
    }


def test_keeper_that_takes_over_before_the_first_commit_knows_what_the_run_began_with(tmp_path: Path) -> None:
    origin = keeper(tmp_path).begin(LAYOUT, *flats(9)[:2])
    assert ask(keeper(tmp_path), 0, 1).commit.parent_sha256 == origin


def test_keeper_begins_with_the_weights_of_the_newest_commit_only(tmp_path: Path) -> None:
    commit = ask(keeper(tmp_path), 0, 1).commit
    assert keeper(tmp_path).begin(LAYOUT, *flats(1)[:2]) == commit.theta_sha256
    with pytest.raises(CheckpointError, match="weights differ from those of the newest commit"):
        keeper(tmp_path).begin(LAYOUT, *flats(2)[:2])


def test_keeper_snapshot_has_inner_states_and_the_schedulers_own(tmp_path: Path) -> None:
    ask(keeper(tmp_path), 0, 5)
    folder = tmp_path / "checkpoints" / "round_000000"
    assert sorted(path.name for path in folder.iterdir()) == sorted(PARTS)
    record = json.loads((folder / "state.json").read_text())
    assert set(record["sha256"]) == set(PARTS) - {"state.json"} and record["state"]["scheduler"] == {"seed": 5}
    snapshot = load_snapshot(tmp_path, 0)
    for worker in (0, 3):
        assert snapshot.inner[worker].keys() == {"exp_avg", "rng"}
        assert all(
            np.array_equal(snapshot.inner[worker][name], inner_state(worker, 5)[name]) for name in ("exp_avg", "rng")
        )


def test_keeper_with_an_inner_state_too_few_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="zip"):
        keeper(tmp_path).commit(persist(0, 1), LAYOUT, (0, 3), *flats(1), inner_state(0, 1))
    assert rounds(tmp_path) == [] and CommitLog(tmp_path).rounds() == []


@pytest.mark.parametrize("write", range(1, 7))
def test_keeper_full_disk_at_any_write_goes_on_says_so_and_catches_up(tmp_path: Path, write: int) -> None:
    store = keeper(tmp_path, keep=1)
    ask(store, 0, 1)
    refused = ",".join(map(str, range(write, 7)))
    with armed(tmp_path / "hits", f"store.write=nospace@{refused}"):
        saved = ask(store, 1, 2)
    assert saved.problem is not None and "\n" not in saved.problem
    assert saved.written == (CommitLog(tmp_path).rounds() == [0, 1]), "what is called written is there"
    for part in ("can't be written: No space left on device", "MB of free space", "make room there", "1 of 10 rounds"):
        assert part in saved.problem
    assert 0 in rounds(tmp_path) and load_snapshot(tmp_path, 0).state["scheduler"] == {"seed": 1}
    assert list(tmp_path.glob("*/*.tmp")) == []
    found = restart(tmp_path)
    assert found is not None and found.next_round == 1
    again = ask(store, 2, 3)
    assert again.problem is None and again.written and rounds(tmp_path) == [2]
    log = CommitLog(tmp_path)
    check_chain(log.read())
    assert log.read()[1:] == (saved.commit, again.commit)


def test_keeper_disk_that_stays_full_ends_the_run_and_leaves_what_was_good(tmp_path: Path) -> None:
    store = keeper(tmp_path, failures=3)
    ask(store, 0, 1)
    with armed(tmp_path / "hits", "store.write=nospace@*"):
        assert [bool(ask(store, number, number + 1).problem) for number in (1, 2)] == [True, True]
        with pytest.raises(TryAgainError, match="can't be written") as caught:
            ask(store, 3, 4)
    assert caught.value.exit_code == 75
    found = restart(tmp_path)
    assert found is not None and found.next_round == 1 and found.state == {"seed": 1}


def test_keeper_refusals_with_a_success_between_them_do_not_end_the_run(tmp_path: Path) -> None:
    store = keeper(tmp_path, failures=2)
    for number in range(6):
        specs = ["store.write=nospace@*"] if number % 2 else []
        with armed(tmp_path / "hits", *specs):
            assert bool(ask(store, number, number).problem) == bool(specs)


def test_keeper_last_round_that_cannot_be_saved_ends_the_run(tmp_path: Path) -> None:
    store = keeper(tmp_path, update_rounds=2)
    ask(store, 0, 1)
    with armed(tmp_path / "hits", "store.write:model=nospace@1"), pytest.raises(TryAgainError):
        ask(store, 1, 2)
    assert ask(store, 1, 2).problem is None and load_snapshot(tmp_path, 1).state["scheduler"] == {"seed": 2}


def test_keeper_snapshot_that_was_refused_is_due_in_the_next_round(tmp_path: Path) -> None:
    store = keeper(tmp_path, every_rounds=3)
    ask(store, 0, 1)
    ask(store, 1, 2)
    with armed(tmp_path / "hits", "store.write:model=nospace@1"):
        assert ask(store, 2, 3).problem is not None
    assert CommitLog(tmp_path).rounds() == [0, 1, 2], "the record is small, and is written all the same"
    assert ask(store, 3, 4).problem is None
    assert rounds(tmp_path) == [0, 3]


def test_keeper_whose_waiting_records_died_with_the_one_before_asks_to_try_again(tmp_path: Path) -> None:
    store = keeper(tmp_path)
    ask(store, 0, 1)
    with armed(tmp_path / "hits", "store.write=nospace@*"):
        ask(store, 1, 2)
    with pytest.raises(TryAgainError, match="ends before round 2") as caught:
        ask(keeper(tmp_path), 2, 3)
    assert caught.value.code == "STORE010"


def test_keeper_records_that_waited_for_the_first_snapshot_and_did_not_all_fit_start_anew(tmp_path: Path) -> None:
    store = keeper(tmp_path)
    for number, refused in ((0, "*"), (1, "7")):
        with armed(tmp_path / "hits", f"store.write=nospace@{refused}"):
            assert ask(store, number, number).problem is not None
    assert CommitLog(tmp_path).rounds() == [0] and rounds(tmp_path) == [1]
    assert restart(tmp_path) is None
    assert ask(keeper(tmp_path), 0, 7).problem is None


def test_keeper_prunes_by_what_belongs_to_the_log(tmp_path: Path) -> None:
    """A snapshot of a round that was taken back must not push a good one out."""
    store = keeper(tmp_path, every_rounds=2, keep=2)
    for number in range(6):
        ask(store, number, number)
    (tmp_path / "checkpoints" / "round_000005" / "model.safetensors").write_bytes(b"")
    found = restart(tmp_path)
    assert found is not None and found.next_round == 4
    found.rewind()
    assert rounds(tmp_path) == [3, 5]
    store = keeper(tmp_path, every_rounds=2, keep=1)
    ask(store, 4, 40)
    assert rounds(tmp_path) == [3, 5]
    ask(store, 5, 50)
    assert rounds(tmp_path) == [5] and load_snapshot(tmp_path, 5).state["scheduler"] == {"seed": 50}


def test_flattened_is_the_reverse_of_named() -> None:
    weights, momentum = flats(3)[:2], flats(3)[2:]
    for kind, expected in (("", weights), ("parameters/", momentum)):
        again = flattened(LAYOUT, named(LAYOUT, expected, kind), kind)
        assert [flat.keys() for flat in again] == [flat.keys() for flat in expected]
        assert all(np.array_equal(a[g], b[g]) for a, b in zip(again, expected, strict=True) for g in a)


def log(directory: Path, number: int, **figures: Any) -> None:
    with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "round", "round": number, "loss": 0.0}) + "\n")
        file.write(json.dumps({"kind": "eval", "round": number, **figures}) + "\n")


def test_best_snapshot_is_kept_beside_the_newest(tmp_path: Path) -> None:
    store = CommitWriter(tmp_path, Checkpoint(best=True, keep=2), 1000)
    for number, loss in enumerate((5.0, 3.0, 4.0, 3.5, 3.2, 6.0)):
        ask(store, number, number + 1)
        log(tmp_path, number, val_loss=loss)
    assert rounds(tmp_path) == [1, 4, 5]
    log(tmp_path, 5, val_loss=2.0)
    ask(store, 6, 7)
    ask(store, 7, 8)
    assert rounds(tmp_path) == [5, 6, 7]


def test_snapshots_stay_until_they_are_evaluated_and_no_longer(tmp_path: Path) -> None:
    store = CommitWriter(tmp_path, Checkpoint(best=True, keep=1, every_rounds=100), 1000, evaluate_every=2)
    for number in range(6):
        ask(store, number, number + 1)
    assert rounds(tmp_path) == [1, 3, 5], "of the evaluated rounds, without waiting for the hundredth"
    for number, loss in ((1, 2.0), (3, 1.0), (5, 4.0)):
        log(tmp_path, number, val_loss=loss)
    ask(store, 6, 7)
    ask(store, 7, 8)
    assert rounds(tmp_path) == [3, 7]


def test_evaluated_weights_of_a_run_that_may_end_early_are_saved(tmp_path: Path) -> None:
    store = CommitWriter(tmp_path, Checkpoint(keep=1, every_rounds=100), 1000, evaluate_every=2, may_end_early=True)
    for number in range(5):
        ask(store, number, number + 1)
    assert rounds(tmp_path) == [3], "round 4 isn't evaluated, and may not be the last"


def test_without_the_wish_only_the_newest_stay(tmp_path: Path) -> None:
    store = CommitWriter(tmp_path, Checkpoint(keep=2), 1000)
    for number in range(4):
        ask(store, number, number + 1)
        log(tmp_path, number, val_loss=float(number))
    assert rounds(tmp_path) == [2, 3]


def test_best_is_by_the_objective_and_the_earliest_of_equal_ones(tmp_path: Path) -> None:
    found = Evaluations(tmp_path)
    assert (found.best, found.newest) == (None, None)
    for number, reward in enumerate((0.1, 0.9, 0.9, None)):
        log(tmp_path, number, reward=reward, val_loss=1.0 - number)
    assert found.objective.name == "reward" and found.best is not None
    assert (found.best["round"], found.newest) == (1, 3)


def test_a_line_in_the_making_is_read_once_it_is_whole_and_a_cut_file_from_its_beginning(tmp_path: Path) -> None:
    log(tmp_path, 0, val_loss=3.0)
    found, file = Evaluations(tmp_path), tmp_path / "metrics.jsonl"
    before = file.read_text()
    line = json.dumps({"kind": "eval", "round": 1, "val_loss": 2.0})
    file.write_text(before + line[:20])
    assert found.newest == 0
    file.write_text(before + line + "\n")
    assert found.newest == 1
    file.write_text(before)
    assert found.newest == 0
