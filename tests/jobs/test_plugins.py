"""A job with members that lie beside it, of all families that a training job uses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.forked_process import ROOT
from tests.support.job_scripts import jobs_in
from tests.support.plugins import write_examples


def test_job_trains_with_the_members_beside_it(small_job: Path, head: str, tmp_path: Path) -> None:
    place = tmp_path / "beside"
    place.mkdir()
    (place / "jobs").symlink_to(ROOT / "jobs")
    draws, data = np.random.default_rng(0), tmp_path / "data"
    data.mkdir()
    ids = draws.integers(3, 11, (256, 32), dtype=np.int32)
    for split, rows in (("train", 256), ("validation", 16)):
        samples = {"input_ids": ids[:rows], "attention_mask": np.ones_like(ids[:rows])}
        save_file(samples, data / f"{split}.safetensors")
    files = [small_job]
    for number, piece in enumerate(write_examples(place)):
        files.append(place / f"{number}.toml")
        files[-1].write_text(piece, encoding="utf-8")
    arguments = [word for file in files for word in ("@", str(file))]
    with jobs_in(tmp_path / "home", place, head) as run_job:
        done = run_job(*arguments, "--run.name", "own", "--dataset.path", data)
        assert done.returncode == 0, done.stderr
        run = run_job.home / "own"
        lines = [json.loads(line) for line in (run / "lines.txt").read_text().splitlines()]
        assert [line for line in lines if line[0] == "round"] == [["round", number] for number in range(3)]
        rounds, evals = read_jsonl(run / "metrics.jsonl", ["round"]), read_jsonl(run / "metrics.jsonl", ["eval"])
        assert evals[-1]["val_loss"] < evals[0]["val_loss"]
        assert rounds[0]["bytes_up"] < rounds[0]["bytes_down"] / 3  # A sign has 8 bits of 32.
        identity = json.loads((run / "identity.json").read_text())
        assert {"sync.codec signs:Signs", "outer_optimizer.name heavy_ball:HeavyBall"} <= identity.keys()
        with (place / "heavy_ball.py").open("a") as file:
            file.write("# changed\n")
        again = run_job(
            *arguments, "--run.name", "own", "--dataset.path", data, "--rounds.update_rounds", "4", "--resume"
        )
        assert again.returncode == 5 and "CKPT007" in again.stderr and "heavy_ball" in again.stderr


@pytest.mark.parametrize("name", ["not_here:Codec", "int9"])
def test_job_with_a_codec_that_is_not_there_is_refused(small_job: Path, head: str, tmp_path: Path, name: str) -> None:
    with jobs_in(tmp_path / "home", ROOT, head) as run_job:
        done = run_job("@", small_job, "--sync.codec", name, "--dry-run")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error[") and "Traceback" not in done.stderr
