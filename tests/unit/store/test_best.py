"""The snapshot with the best evaluation stays beside the newest ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypha_ray.config.training import Checkpoint
from hypha_ray.store.commit_writer import CommitWriter, Evaluations
from hypha_ray.store.snapshots import rounds
from tests.support.store_bench import ask


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
