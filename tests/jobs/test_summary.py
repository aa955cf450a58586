"""The summary at the head of a dry run and of a start, as a user sees it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from tests.support.job_scripts import Jobs

SUBJECTS = ["model", "data", "rounds", "exchange", "disk", "memory", "settings", "time"]


def test_dry_run_start_and_resumption_begin_with_a_summary(run_job: Jobs, corpus: Path, small_job: Path) -> None:
    words = ("@", small_job, "--dataset.path", corpus)
    dry = run_job(*words, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    head = [line for line in dry.stdout.splitlines() if line.startswith("# ")]
    assert dry.stdout.startswith("\n".join(head) + "\n\n[run]\n")
    assert [line.split()[1] for line in head] == SUBJECTS
    assert head[-1] == "# time       not measured yet: --rounds.update_rounds 2 shows the pace"
    assert "training step" not in dry.stderr and "settings of workers" not in dry.stderr
    job_file = dry.stdout.rsplit("resources:", 1)[0]
    assert tomllib.loads(job_file)["rounds"]["update_rounds"] == 3

    done = run_job(*words, "--run.name", "first")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    run = f"run: {run_job.home / 'first'}"
    assert [line.split()[0] for line in lines[: lines.index(run)]] == SUBJECTS
    assert [f"# {line}" for line in lines[:4]] == head[:4] and f"# {lines[5]}" == head[5]
    assert lines[-1] == run

    records = [json.loads(line) for line in (run_job.home / "first" / "metrics.jsonl").read_text().splitlines()]
    rounds = [record for record in records if record["kind"] == "round"]
    megabytes = sum(record["bytes_up"] for record in rounds) / 1e6
    (exchange,) = [line for line in lines if line.startswith("exchange")]
    assert f", {megabytes * 1000:.0f} kB and {megabytes * 1000:.0f} kB in all (2 workers, fp32)" in exchange

    again = run_job(*words, "--dry-run")
    (time,) = [line for line in again.stdout.splitlines() if line.startswith("# time")]
    assert time.startswith("# time       about ") and time.endswith(" of run first on cpu")

    longer = run_job("--resume", "first", "--rounds.update_rounds", "5")
    lines = longer.stdout.splitlines()
    assert [line.split()[0] for line in lines[: lines.index(run)]] == ["model", "data", "rounds", "exchange", "disk",
                                                                       "time"]  # fmt: skip
    assert "; 3 are done" in lines[2] and " for the rest: " in lines[5]


def test_refused_dry_run_prints_the_job_file_without_a_summary(run_job: Jobs, corpus: Path, small_job: Path) -> None:
    done = run_job("@", small_job, "--dataset.path", corpus, "--model.config.vocab_size", "100", "--dry-run")
    assert done.returncode == 3
    assert done.stdout.startswith("[run]\n")
    assert tomllib.loads(done.stdout)["model"]["config"]["vocab_size"] == 100
