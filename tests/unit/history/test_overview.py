"""The list of runs: their states and figures, whatever else lies in the folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hypha_ray.history.overview import State, aligned, listing, overview, overviews
from hypha_ray.store.directory import RunDirectory
from tests.support.run_folders import evaluation, make_run, round_record

ATTEMPT = {"kind": "attempt", "attempt": 1}
STOP = {"kind": "stop", "reason": "val_loss no better for 2 rounds"}


def test_run_with_all_rounds_and_a_model_is_finished(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=3)
    assert overview(folder).state is State.INTERRUPTED  # Its model isn't saved yet.
    (folder / "model").mkdir()
    assert overview(folder).state is State.FINISHED


def test_run_that_shall_have_more_rounds_than_it_has_is_interrupted_though_it_has_a_model(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=3, rounds={"update_rounds": 4})
    (folder / "model").mkdir()
    assert overview(folder).state is State.INTERRUPTED


@pytest.mark.parametrize(
    ("events", "state"), [([ATTEMPT, STOP], State.FINISHED), ([ATTEMPT, STOP, ATTEMPT], State.INTERRUPTED)]
)
def test_run_that_ended_early_is_finished_unless_it_has_begun_again(
    tmp_path: Path, events: list[dict[str, object]], state: State
) -> None:
    folder = make_run(tmp_path, commits=2, events=events)
    (folder / "model").mkdir()
    assert overview(folder).state is state


def test_run_is_running_as_long_as_a_driver_has_its_lock(tmp_path: Path) -> None:
    folder = make_run(tmp_path, provenance={"error": "error[NET003]: old"})
    with RunDirectory(folder).lock():
        assert overview(folder).state is State.RUNNING
    assert overview(folder).state is State.FAILED


def test_error_of_the_last_start_makes_a_failed_run(tmp_path: Path) -> None:
    run = overview(make_run(tmp_path, provenance={"error": "error[TRN001]: all deltas were rejected."}))
    assert (run.state, run.error) == (State.FAILED, "error[TRN001]: all deltas were rejected.")


def test_figures_are_those_of_the_last_records(tmp_path: Path) -> None:
    metrics = [
        round_record(0, 4.0),
        evaluation(0, 3.5),
        {"kind": "step", "round": 1, "loss": 9.0, "text": "x" * 100_000},
        round_record(1, 3.0, workers=1),
    ]
    costs = [{"kind": "cost", "cost": 0.25}, {"kind": "join", "worker": 0}, {"kind": "cost", "cost": 0.5}]
    run = overview(make_run(tmp_path, commits=2, metrics=metrics, events=costs))
    assert (run.rounds, run.total_rounds, run.objective, run.value) == (2, 3, "val_loss", 3.5)
    assert (run.workers, run.cost) == (1, 0.75)


@pytest.mark.parametrize(
    ("metrics", "objective", "value"),
    [
        ([], "loss", None),
        ([round_record(0, 4.0)], "loss", 4.0),
        ([round_record(0, -0.1, reward=0.5)], "reward", 0.5),
        ([round_record(0, -0.1, reward=0.5), {"kind": "eval", "round": 0, "reward": 0.7}], "val_reward", 0.7),
        ([round_record(0, 4.0), evaluation(0, None)], "val_loss", None),
    ],
)
def test_objective_is_that_of_an_evaluation_or_of_a_round(
    tmp_path: Path, metrics: list[dict[str, object]], objective: str, value: float | None
) -> None:
    run = overview(make_run(tmp_path, metrics=metrics))
    assert (run.objective, run.value) == (objective, value)


def test_newest_run_is_first_and_other_folders_are_no_runs(tmp_path: Path) -> None:
    for name, time_s in (("old", 100.0), ("new", 300.0), ("middle", 200.0)):
        for file in make_run(tmp_path, name).iterdir():
            os.utime(file, (time_s, time_s))
    (tmp_path / "datasets").mkdir()
    (tmp_path / "notes.txt").write_text("")
    listed, unreadable = overviews(tmp_path)
    assert ([run.name for run in listed], unreadable) == (["new", "middle", "old"], [])
    assert [row[4] for row in list(listing(listed, 400.0))[1:]] == ["1m40s", "3m20s", "5m00s"]


def test_damaged_runs_do_not_stop_the_list(tmp_path: Path) -> None:
    make_run(tmp_path, "good")
    (make_run(tmp_path, "torn") / "config.toml").write_text("[run")
    make_run(tmp_path, "foreign", metrics=[{"kind": "eval", "val_loss": "low"}])
    listed, unreadable = overviews(tmp_path)
    assert {run.name: run.state for run in listed} == {"good": State.INTERRUPTED, "torn": State.DAMAGED}
    assert unreadable == [tmp_path / "foreign"]


def test_folder_that_is_not_there_has_no_runs(tmp_path: Path) -> None:
    assert overviews(tmp_path / "nosuch") == ([], [])


def test_lines_have_a_column_for_each_figure_and_a_dash_for_each_missing_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=1, metrics=[round_record(0, 4.0), evaluation(0, 3.5)])
    empty = make_run(tmp_path, "a-longer-name")
    for file in (*folder.glob("*.*"), *empty.glob("*.*")):
        os.utime(file, (0.0, 0.0))
    lines = list(aligned(listing([overview(folder), overview(empty)], 7200.0)))
    assert lines == [
        "run            state        round  objective        age    workers  cost",
        "first          interrupted  1/3    val_loss 3.5000  2h00m  2        -",
        "a-longer-name  interrupted  0/3    -                2h00m  -        -",
    ]


def test_tags_have_a_column_if_any_run_has_one(tmp_path: Path) -> None:
    tagged = make_run(tmp_path, run={"tags": ["baseline", "long run"]})
    lines = list(listing([overview(tagged), overview(make_run(tmp_path, "other"))], 7200.0))
    assert [line[-1] for line in lines] == ["tags", "baseline, long run", ""]
    assert overview(tagged).as_json()["tags"] == ["baseline", "long run"]


def test_json_of_a_run_has_its_folder_and_the_time_of_its_last_record(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=1, metrics=[round_record(0, 4.0)])
    for file in folder.glob("*.*"):
        os.utime(file, (86400.0, 86400.0))
    assert overview(folder).as_json() == {
        "name": "first",
        "folder": str(folder),
        "state": "interrupted",
        "error": None,
        "rounds": 1,
        "total_rounds": 3,
        "objective": "loss",
        "value": 4.0,
        "workers": 2,
        "cost": None,
        "tags": [],
        "last_record": "1970-01-02T00:00:00+00:00",
    }


@pytest.mark.parametrize(
    ("epochs", "last", "total", "state"),
    [
        (3, {"rounds": 2, "epoch": 3}, 2, State.FINISHED),
        (3, {"rounds": 5, "epoch": 1}, 5, State.INTERRUPTED),
        (5, {"rounds": 2, "epoch": 3}, None, State.INTERRUPTED),  # It had used its samples, and shall use them again.
    ],
)
def test_rounds_of_a_run_that_ends_by_epochs_are_those_of_its_last_record(
    tmp_path: Path, epochs: int, last: dict[str, int], total: int | None, state: State
) -> None:
    metrics = [round_record(0, 4.0, rounds=5, epoch=0), round_record(1, 3.0, **last)]
    folder = make_run(tmp_path, commits=2, metrics=metrics, rounds={"epochs": epochs})
    (folder / "model").mkdir()
    run = overview(folder)
    assert (run.total_rounds, run.state) == (total, state)


def test_list_has_no_control_characters_of_a_damaged_job_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "coloured")
    job_file = folder / "config.toml"
    job_file.write_text('[run]\ntags = ["a\\u001b[31mb"]\n')
    *_, line = aligned(listing([overview(folder)], now_s=0.0))
    assert line.endswith("a [31mb")


def test_run_with_an_empty_job_file_is_damaged(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    (folder / "config.toml").write_text("")
    assert overview(folder).state is State.DAMAGED
