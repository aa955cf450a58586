"""Processes that die, hang or fall silent in mid-run: training goes on, and every sample is committed once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faults import audit_fleet_time, events, is_back, news, survive, told_of_replacements
from tests.support.head_node import free_port
from tests.support.jobs import job_of, run_job

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("local_ray")


def test_worker_that_fails_in_mid_round_is_replaced_and_contributes_again(corpus: Path, tmp_path: Path) -> None:
    def back() -> bool:
        return is_back(tmp_path / "worker", 1, len(ways))

    ways = {"kill": 7, "stop": 21, "hold": 35, "error": 49}
    rounds, slow = {"update_rounds": 40, "samples_between_updates": 160}, {"slowdown": [8.0, 8.0]}
    specs = [f"worker.step:1={how}@{hit}" for how, hit in ways.items()]
    run = survive("worker", corpus, tmp_path, specs, 4, back, rounds=rounds, testing=slow)
    losses = events(run, "loss")
    assert [loss["worker"] for loss in losses] == [1] * 4
    assert ["silent" in loss["reason"] for loss in losses] == [how in ("stop", "hold") for how in ways]
    joined = [event["incarnation"] for event in events(run, "join") if event["worker"] == 1]
    assert news(run)[0] == "2 workers joined (0-1): cpu"
    assert re.match(r"worker 1 was lost: its process \d+ on [\d.]+ ended without a word: killed", news(run)[1])
    assert joined[:4] == [loss["incarnation"] for loss in losses] and joined == sorted(set(joined)) and len(joined) == 5
    trained = {delta["incarnation"] for commit in run.commits() for delta in commit["deltas"] if delta["worker"] == 1}
    assert trained - {joined[0]} and joined[4] in trained


def test_silent_worker_loses_its_lease_within_five_seconds_of_its_planned_report(corpus: Path, tmp_path: Path) -> None:
    rounds = {"update_rounds": 3, "samples_between_updates": 240}
    tables = {"rounds": rounds, "testing": {"slowdown": [8.0, 8.0]}, "worker": {"lease_s": 5.0}}
    run = survive("silent", corpus, tmp_path, ["worker.step:1=stop@9"], 1, **tables)
    stopped = [record for record in run.of_kind("step") if record["worker"] == 1]
    assert stopped
    (loss,) = events(run, "loss")
    reported = next(event for event in events(run, "join") if event["worker"] == 1)["monotonic_s"]
    assert loss["reason"] == "silent for 5 s" and loss["monotonic_s"] > reported


@pytest.mark.long
def test_time_of_a_run_with_a_killed_worker_and_a_silent_one_is_accounted_for(corpus: Path, tmp_path: Path) -> None:
    rounds = {"update_rounds": 4, "samples_between_updates": 160}
    tables = {"rounds": rounds, "testing": {"batch_times_s": [0.1, 0.1]}, "worker": {"lease_s": 5.0}}
    run = survive("time", corpus, tmp_path, ["worker.step:1=kill@12", "worker.step:1=stop@40"], 2, **tables)
    seconds = audit_fleet_time(run, 2)
    _, silent = events(run, "loss")
    assert "silent" in silent["reason"]
    # At least the lease of the silent one; at most all between its last whole round and its loss, and so of the killed.
    assert seconds["loss"] > 5.0
    # Every batch takes 0.1 s at least: committed samples are 4 a batch.
    committed = sum(record["samples"] for record in run.of_kind("round"))
    assert 0.1 * committed / 4 <= seconds["training"] < 0.5 * committed / 4
    assert seconds["start"] > 0 and seconds["evaluation"] > 0 and seconds["exchange"] > 0


def test_worker_killed_around_its_delta_leaves_it_whole_or_absent(corpus: Path, tmp_path: Path) -> None:
    specs = [f"worker.{point}:1=kill@2" for point in ("before_delta", "mid_delta", "after_delta")]
    tables = {"rounds": {"update_rounds": 7}, "resources": {"num_workers": 2, "min_workers": 2}}
    run = survive("around", corpus, tmp_path, specs, 3, **tables)
    assert [loss["worker"] for loss in events(run, "loss")] == [1] * 3


def test_server_that_fails_over_a_round_is_replaced_and_the_round_counts_once(corpus: Path, tmp_path: Path) -> None:
    specs = ["server.before_reduce=stop@2", "server.after_reduce=kill@3"]
    run = survive("server", corpus, tmp_path, specs, 2, rounds={"update_rounds": 5})
    assert [event["role"] for event in events(run, "revive")] == ["server-0"] * 2
    assert told_of_replacements(run, "server-0")
    assert not events(run, "loss")


def test_shard_that_fails_in_mid_read_serves_the_slice_again(corpus: Path, tmp_path: Path) -> None:
    run = survive("shard", corpus, tmp_path, ["shard.read=stop@2", "shard.read=exit@4"], 2, rounds={"update_rounds": 8})
    assert [event["role"] for event in events(run, "revive")] == ["shard-0"] * 2
    assert told_of_replacements(run, "shard-0")


@pytest.mark.long
def test_store_that_fails_in_a_commit_is_replaced_and_commits(corpus: Path, tmp_path: Path) -> None:
    specs = ["store.before_snapshot=stop@2", "store.before_record=kill@3", "store.after_record=stop@4"]
    run = survive("store", corpus, tmp_path, specs, 3, rounds={"update_rounds": 6})
    assert [event["role"] for event in events(run, "revive")] == ["store"] * 3
    assert told_of_replacements(run, "store")


def test_telemetry_that_fails_costs_no_round(corpus: Path, tmp_path: Path) -> None:
    specs = ["telemetry.write=stop@3", "telemetry.write=error@4"]
    run = survive("telemetry", corpus, tmp_path, specs, 2, rounds={"update_rounds": 6})
    assert len(run.of_kind("round")) == 6


def test_connector_that_goes_is_told_once_and_costs_no_round(corpus: Path, tmp_path: Path) -> None:
    port, file = free_port(), tmp_path / "status.csv"
    command = [sys.executable, str(ROOT / "examples" / "status_connector.py"), str(port), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as connector:
        assert connector.stdout is not None and connector.stdout.readline().startswith("listening")
        telemetry = {"sinks": ["jsonl"], "status_bridge": f"127.0.0.1:{port}"}
        job = job_of("connector", corpus, rounds={"update_rounds": 12}, telemetry=telemetry)
        run = run_job(job, tmp_path, corpus, seen=lambda record: connector.kill() if record.get("round") == 6 else None)
    assert len(run.of_kind("round")) == 12
    rows = [row.split(",") for row in file.read_text(encoding="utf-8").splitlines()[1:]]
    losses = {record["round"]: record["val_loss"] for record in run.of_kind("eval")}
    sent = {int(number): float(value) for worker, number, name, value in rows if (worker, name) == ("all", "val_loss")}
    assert sent and sent == {number: losses[number] for number in sent}
    (problem,) = (text for text in news(run) if "status_bridge" in text)
    assert f"no connector at 127.0.0.1:{port}" in problem and "training goes on" in problem
    assert run.records[-1]["sinks"]["status_bridge"]["failed"] > 1


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.long(keep=1)
def test_scheduler_that_fails_is_started_again_from_the_last_commit(how: str, corpus: Path, tmp_path: Path) -> None:
    run = survive(f"scheduler-{how}", corpus, tmp_path, [f"scheduler.before_reduce={how}@3"], 1)
    attempts = events(run, "attempt")
    assert [event["attempt"] for event in attempts] == [1, 2]
    assert attempts[1]["next_round"] in (1, 2)
    grown = [event["incarnation"] for event in events(run, "hire") if event["worker"] == 0]
    assert grown == sorted(set(grown)) and len(grown) == 2


def test_all_workers_killed_at_once_wait_for_no_one_and_lose_nothing(corpus: Path, tmp_path: Path) -> None:
    specs = ["worker.step:0=kill@9", "worker.step:1=kill@9"]
    run = survive("all", corpus, tmp_path, specs, 2, rounds={"samples_between_updates": 128})
    assert sorted(loss["worker"] for loss in events(run, "loss")) == [0, 1]
    assert all(commit["deltas"] for commit in run.commits())


@pytest.mark.long
def test_three_epochs_under_kills_use_every_sample_once_in_each(corpus: Path, tmp_path: Path) -> None:
    kills = ["worker.step:0=kill@16,60,104", "worker.step:1=kill@32,80,132", "server.after_reduce=kill@3,9"]
    rounds = {"update_rounds": 18, "samples_between_updates": 300, "max_batch_size": 10, "evaluate_every": 0}
    run = survive("epochs", corpus, tmp_path, kills, 8, rounds=rounds)
    counts = run.used()
    assert run.commits()[-1]["epoch"] == 3
    assert all(counts[epoch, index, n] == 1 for epoch in range(3) for index in range(15) for n in range(100))


def test_full_disk_at_a_checkpoint_is_told_and_training_goes_on(corpus: Path, tmp_path: Path) -> None:
    run = survive("full", corpus, tmp_path, ["store.write=nospace@3,4"], 2, rounds={"update_rounds": 6})
    problems = [problem["text"] for problem in events(run, "problem")]
    assert problems and all("no space" in text.lower() for text in problems)
    assert [text for text in news(run) if "space" in text.lower()] == list(dict.fromkeys(problems))
    assert len(list((run.directory / "checkpoints").glob("round_000005/model.safetensors"))) == 1
