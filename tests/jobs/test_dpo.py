"""`jobs/dpo.py` as a user runs it: it learns from preferences, and leaves a model that is scored alike elsewhere."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from hypha_ray.failpoints import hits
from hypha_ray.telemetry.sinks.files import read_jsonl
from hypha_ray.types import Span
from tests.support.job_scripts import Jobs
from tests.support.preference_rows import digit_pairs

TINY = ("@", "jobs/configs/dpo.toml", "--rounds.update_rounds", "10")


@pytest.fixture(scope="module")
def pairs(run_shared_job: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    source = digit_pairs(folder / "preferences.jsonl")
    words = ("--source", source, "--kind", "preferences", "--tokenizer", "characters", "--out", folder / "out")
    done = run_shared_job(*words, script="prepare")
    assert done.returncode == 0, done.stderr
    assert 'rejected   "' in done.stdout
    return folder / "out"


@pytest.fixture(scope="module")
def run(run_shared_job: Jobs, pairs: Path) -> Path:
    """The folder of a run with ten rounds of the ready job file, of two workers, of which one is killed twice."""
    log = pairs.parent / "hits.jsonl"
    points = ["worker.mid_delta:1=kill@3", "worker.mid_delta:1=kill@6"]
    flags = ("--testing.failpoints", json.dumps(points), "--testing.failpoint_log", log)
    done = run_shared_job(*TINY, "--dataset.path", pairs, "--run.name", "two", *flags, script="dpo")
    assert hits(log, "worker.mid_delta") == 2
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return Path(done.stdout.splitlines()[-1].removeprefix("run: "))


def test_two_workers_learn_to_prefer_what_was_chosen(run: Path) -> None:
    records = read_jsonl(run / "metrics.jsonl")
    evaluations = [record for record in records if record["kind"] == "eval"]
    assert evaluations[-1]["accuracy"] >= 0.95
    assert evaluations[-1]["margin"] > 0
    assert "perplexity" not in evaluations[-1]
    for record in records:
        if record["kind"] in ("round", "eval"):
            difference = record["reward_chosen"] - record["reward_rejected"]
            assert record["margin"] == pytest.approx(difference)
            accuracy = "accuracy" if record["kind"] == "eval" else "train_accuracy"
            assert 0 <= record[accuracy] <= 1
    commits = [json.loads(file.read_text()) for file in sorted((run / "commits").glob("*.json"))]
    assert len(commits) == 10
    assert sum(delta["samples"] for commit in commits for delta in commit["deltas"]) == 6400


def test_each_pair_of_an_epoch_is_in_exactly_one_commit_whatever_was_killed(run: Path) -> None:
    used = Counter[tuple[int, int, int]]()
    for file in (run / "commits").glob("round_*.json"):
        for spans in json.loads(file.read_text())["spans"].values():
            for span in itertools.starmap(Span, spans):
                used.update((span.epoch, span.slice, sample) for sample in range(span.start, span.stop))
    assert set(used.values()) == {1}
    by_epoch = Counter(epoch for epoch, *_ in used)
    assert sum(by_epoch.values()) == 6400
    assert all(by_epoch[epoch] == 684 for epoch in range(8))


def test_saved_model_is_scored_as_in_the_run_and_the_run_goes_on(run: Path, run_shared_job: Jobs, pairs: Path) -> None:
    done = run_shared_job("--model", run / "model", "--dataset", pairs, "--json", script="evaluate")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    last = [record for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "eval"][-1]
    for name in ("val_loss", "accuracy", "margin", "reward_chosen", "reward_rejected"):
        assert figures[name] == pytest.approx(last[name], rel=1e-4)
    resumed = run_shared_job("--resume", "two", "--rounds.update_rounds", "11", script="dpo")
    assert resumed.returncode == 0, resumed.stderr
    rounds = [record["round"] for record in read_jsonl(run / "metrics.jsonl") if record["kind"] == "round"]
    assert rounds == list(range(11))
