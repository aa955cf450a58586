"""`jobs/sync.py`: digits by two workers that exchange gradients in every step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare


def test_two_workers_learn_digits_from_scratch(run_job: Any, tmp_path: Path) -> None:
    digits = tmp_path / "digits-data"
    prepare(PrepareOptions("digits", digits), lambda what, count: None)
    job = ("@", "jobs/configs/sync.toml", "--dataset.path", digits, "--run.dir", tmp_path, "--run.name", "digits")
    done = run_job(*job, script="sync")
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"run: {tmp_path / 'digits'}")
    lines = (tmp_path / "digits" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rounds = [record for record in map(json.loads, lines) if record["kind"] == "round"]
    assert [record["round"] for record in rounds] == list(range(200))
    assert all(record["batches"] == {"0": 1, "1": 1} for record in rounds)
    assert rounds[0]["loss"] == pytest.approx(math.log(10), abs=0.3)
    summary = json.loads((tmp_path / "digits" / "summary.json").read_text(encoding="utf-8"))
    assert summary["val_loss"] < 0.3 and rounds[-1]["samples_total"] == 200 * 64
    assert (tmp_path / "digits" / "model" / "model.safetensors").exists()
    again = run_job(*job)
    assert again.returncode == 2 and "sync.strategy is 'diloco' here and 'sync' in the run" in again.stderr
