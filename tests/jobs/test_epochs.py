"""A run of three epochs with kills, which is resumed, and goes on to four: each sample is in as many commits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.telemetry.sinks.files import read_jsonl
from hypha_ray.types import Span
from tests.jobs.test_resume import FAST, attempts, commits, ok, running
from tests.support.job_scripts import Jobs

SAMPLES = 196


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """196 training samples in seven slices."""
    out = tmp_path_factory.mktemp("data") / "texts"
    options = PrepareOptions(
        "stdlib", out, seq_len=32, samples_per_slice=28, validation_samples=16, max_samples=SAMPLES
    )
    prepare(options, lambda what, count: None)
    return out


def uses(run: Path) -> Counter[tuple[int, int]]:
    """How often each (slice, sample) is in a commit."""
    spans = [Span(*span) for commit in commits(run) for spans in commit["spans"].values() for span in spans]
    return Counter((span.slice, sample) for span in spans for sample in range(span.start, span.stop))


def round_records(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "metrics.jsonl", ["round"])


def test_every_sample_is_in_three_commits_after_kills_and_a_resumption_and_then_in_four(
    run_job: Jobs, small_job: Path, texts: Path, tmp_path: Path
) -> None:
    words: tuple[str | Path, ...] = ("@", small_job, "--dataset.path", texts, "--run.name", "three")
    words += ("--rounds.epochs", "3", "--rounds.samples_between_updates", "40", "--testing.batch_s", "0.1")
    kills = ("--testing.failpoints", "worker.step:1=kill@12", "--testing.failpoint_log", tmp_path / "hits")
    with running(run_job.start(*words, *kills), rounds=4, of=15):
        pass
    run = run_job.home / "three"
    assert len(commits(run)) < 15
    done = ok(run_job("--resume", "three", "--testing.failpoints", "[]", *FAST))
    assert "note: rounds.epochs = 3: 588 samples in 15 rounds" in done.stderr
    counts = uses(run)
    assert len(counts) == SAMPLES and set(counts.values()) == {3}
    assert read_jsonl(run / "events.jsonl", ["loss"]) and len(attempts(run)) == 2
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["epochs"], summary["samples"]) == (3, 588)
    records = round_records(run)
    assert [record["round"] for record in records] == list(range(len(commits(run))))
    assert (records[-1]["rounds"], records[-1]["epoch"], records[-1]["samples_total"]) == (len(records), 3, 588)
    assert read_jsonl(run / "metrics.jsonl", ["eval"])[-1]["round"] == len(records) - 1

    again = ok(run_job("--resume", "three", *FAST))
    assert f"run three has all of its {len(records)} rounds" in again.stderr
    assert len(round_records(run)) == len(records)

    ok(run_job("--resume", "three", "--rounds.epochs", "4", *FAST))
    counts = uses(run)
    assert len(counts) == SAMPLES and set(counts.values()) == {4}
    assert round_records(run)[-1]["rounds"] == len(round_records(run)) == len(records) + 5
    card = (run / "model" / "README.md").read_text()
    assert f"{len(records) + 5} of {len(records) + 5}" in card
