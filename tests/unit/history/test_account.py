"""The account of one run, and the search for it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config.load import load
from hypha_ray.driver.run_folders import existing_run, find_run
from hypha_ray.errors import CheckpointError, DataError
from hypha_ray.history.account import RunFiles, account_of
from hypha_ray.history.overview import overview
from hypha_ray.store.directory import RunDirectory
from hypha_ray.telemetry.sinks.files import JsonLines
from tests.support.run_folders import end_run, evaluation, make_run, round_record

METRICS = [
    round_record(0, 4.0),
    evaluation(0, 3.5, perplexity=33.1),
    round_record(1, 3.0),
    evaluation(1, 3.25, perplexity=25.8),
    round_record(2, 2.5),
    evaluation(2, 3.75, perplexity=42.5),
]
STARTED = {"command": ["hypha-ray", "sync", "@", "job.toml"], "dataset": {"name": "texts", "samples": {"train": 20}}}


def subjects(folder: Path) -> dict[str, str]:
    """Lines by their first word or two, which fill eleven characters."""
    return {line[:11].strip(): line[12:] for line in account_of(folder)}


def test_account_of_a_finished_run_has_all_its_figures(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=3, metrics=METRICS, events=[{"kind": "cost", "cost": 1.5}], provenance=STARTED)
    (folder / "model").mkdir()
    assert subjects(folder) == {
        "run": f"first, {folder}",
        "state": "finished, 3 of 3 rounds",
        "training": "llama from random weights on data/texts, by diloco",
        "loss": "4.0000 → 2.5000",
        "evaluation": "val_loss 3.5000 → 3.7500, perplexity 42.5, best 3.2500 after round 2",
        "data": "30 samples, 1.50 epochs of 20 samples",
        "workers": "2 workers in the last round, 0 lost, 0 deltas rejected",
        "traffic": "3.00kB up, 1.50kB down",
        "time": "6.0s of training, 5 samples/s",
        "cost": "1.5, in the owners' unit",
        "model": str(folder / "model"),
        "go on": f"python jobs/sync.py --resume {folder} --rounds.update_rounds 6",
    }


REWARDED = [
    round_record(0, 0.5, reward=None),
    round_record(1, 0.4, reward=0.25),
    evaluation(1, None, reward=None),
    round_record(2, 0.3, reward=0.5),
    evaluation(2, None, **{"reward": 0.125, "pass@1": 0.25}),
]
AGAIN = [round_record(0, 9.0), evaluation(0, 9.5), *METRICS, round_record(2, 2.25), evaluation(2, 3.0)]
"""Records of a run whose first and last rounds were trained twice."""


@pytest.mark.parametrize(
    "metrics", [METRICS, METRICS[::2], METRICS[:1], [], [*METRICS[:5], evaluation(2, None)], REWARDED, AGAIN]
)
def test_account_and_figures_by_the_summary_are_those_by_all_records(
    tmp_path: Path, metrics: list[dict[str, Any]]
) -> None:
    events = [
        {"kind": "attempt"},
        {"kind": "loss"},
        {"kind": "cost", "cost": 1.5},
        {"kind": "stop", "reason": "enough"},
    ]
    folder = make_run(tmp_path, commits=3, metrics=metrics, events=events, provenance=STARTED)
    (folder / "model").mkdir()
    by_records = account_of(folder), overview(folder)
    end_run(folder)
    assert (account_of(folder), overview(folder)) == by_records


def test_summary_of_an_earlier_attempt_is_no_account_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=3, metrics=METRICS[:2], events=[{"kind": "attempt"}])
    end_run(folder, seconds=77.0)
    assert subjects(folder)["time"].startswith("77.0s"), "the summary is read"
    for file, records in (("metrics.jsonl", METRICS[2:]), ("events.jsonl", [{"kind": "attempt"}])):
        lines = JsonLines(folder / file)
        for record in records:
            lines.write(record)
        lines.close()
    lines_of_run = subjects(folder)
    assert (lines_of_run["loss"], lines_of_run["time"]) == ("4.0000 → 2.5000", "6.0s of training, 5 samples/s")


def test_account_before_the_first_round_has_no_figures(tmp_path: Path) -> None:
    assert list(subjects(make_run(tmp_path))) == ["run", "state", "training", "go on"]


def test_account_has_notes_and_tags_in_a_line_each(tmp_path: Path) -> None:
    folder = make_run(tmp_path, run={"notes": "with a larger\nbatch", "tags": ["baseline", "long run"]})
    lines = subjects(folder)
    assert (lines["notes"], lines["tags"]) == ("with a larger batch", "baseline, long run")


def test_command_that_goes_on_is_one_that_resumes_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "my runs", commits=1)
    words = shlex.split(subjects(folder)["go on"])
    assert words[:2] == ["python", "jobs/diloco.py"]
    loaded = load(words[2:], find_run)
    assert loaded.resume and (loaded.job.run.name, loaded.job.run.dir) == ("first", str(tmp_path / "my runs"))


def test_run_in_the_folder_of_all_runs_is_resumed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path))
    assert subjects(make_run(tmp_path))["go on"] == "python jobs/diloco.py --resume first"


def test_run_that_ended_early_says_why_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    events = [{"kind": "attempt"}, {"kind": "stop", "reason": "no better val_loss for 2 rounds"}]
    rounds = {"update_rounds": 9, "patience": 2, "evaluate_every": 1}
    folder = make_run(tmp_path, commits=3, metrics=METRICS, events=events, rounds=rounds)
    (folder / "model").mkdir()
    lines = subjects(folder)
    assert lines["state"] == "finished, 3 of 9 rounds: no better val_loss for 2 rounds"
    assert lines["go on"].endswith("--rounds.patience 4")


def test_run_whose_budget_is_spent_goes_on_with_a_higher_one(tmp_path: Path) -> None:
    reason = "goal.at_most = 2.5 pays for no further round; 2.41 is spent"
    events = [{"kind": "attempt"}, {"kind": "stop", "reason": reason}]
    goal = {"at_most": 2.5}
    folder = make_run(tmp_path, commits=3, metrics=METRICS, events=events, rounds={"update_rounds": 9}, goal=goal)
    (folder / "model").mkdir()
    lines = subjects(folder)
    assert lines["state"] == f"finished, 3 of 9 rounds: {reason}"
    assert lines["go on"].endswith("--goal.at_most 5")


def test_account_of_a_running_run_names_the_process(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=1, metrics=METRICS[:2])
    with RunDirectory(folder).lock():
        lines = subjects(folder)
    assert lines["state"].startswith("running, 1 of 3 rounds: process ")
    assert "--resume" not in lines["go on"]


def test_account_of_a_killed_run_says_of_how_many_rounds_its_figures_are(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=1, metrics=METRICS)
    lines = subjects(folder)
    assert lines["state"] == "interrupted, 1 of 3 rounds, figures of 3"
    assert RunFiles.read(folder).figures["rounds"] == 3


def test_account_of_a_failed_run_has_its_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path, provenance={"error": "error[TRN001]: bad.", "command": None})
    assert subjects(folder)["state"] == "failed, 0 of 3 rounds: error[TRN001]: bad."


def test_account_of_a_mixture_has_no_epochs(tmp_path: Path) -> None:
    mix = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]
    folder = make_run(tmp_path, commits=1, metrics=METRICS[:1], provenance=STARTED, dataset={"mix": mix})
    assert subjects(folder)["data"] == "10 samples"


def test_damaged_job_file_is_told_and_records_are_still_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=1, metrics=METRICS[:2])
    (folder / "config.toml").write_text("[run")
    lines = subjects(folder)
    assert lines["state"] == "damaged, 1 of 3 rounds" and lines["loss"] == "4.0000" and "go on" not in lines


def test_foreign_record_is_one_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path, commits=1, metrics=[round_record(0, 4.0, time_s="long")])
    with pytest.raises(DataError, match="DATA044"):
        account_of(folder)


def test_run_is_found_by_its_name_or_folder_and_the_nearest_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "texts-1")
    assert existing_run("texts-1", str(tmp_path)) == folder
    assert existing_run(str(folder), None) == folder
    with pytest.raises(CheckpointError, match=r"CKPT001.*did you mean 'texts-1'\?"):
        existing_run("text-1", str(tmp_path))
    make_run(tmp_path, "texts-2")
    with pytest.raises(CheckpointError, match=r"did you mean 'texts-1' or 'texts-2'\?"):
        existing_run("Texts-", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"did you mean 'texts-2'\?"):
        existing_run("TEXTS-2", str(tmp_path))
    with pytest.raises(CheckpointError, match="the job `runs` lists them"):
        existing_run("zzz", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"CKPT001.*there is no run 'nnn"):
        existing_run("n" * 300, str(tmp_path))


def test_error_of_a_run_sends_a_terminal_no_commands(tmp_path: Path) -> None:
    folder = make_run(tmp_path, provenance={"error": "lost\x1b[2J\nworker"})
    (state,) = (line for line in account_of(folder) if line.startswith("state"))
    assert state == "state       failed, 0 of 3 rounds: lost [2J worker"
