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
        done = run_job(*arguments, "--run.name", "own", "--dataset.path", data, "--run.mode", "replay")
        assert done.returncode == 0, done.stderr
        run = run_job.home / "own"
        lines = [json.loads(line) for line in (run / "lines.txt").read_text().splitlines()]
        assert [line for line in lines if line[0] == "round"] == [["round", number] for number in range(3)]
        rounds, evals = read_jsonl(run / "metrics.jsonl", ["round"]), read_jsonl(run / "metrics.jsonl", ["eval"])
        assert evals[-1]["val_loss"] < evals[0]["val_loss"]
        assert rounds[0]["bytes_up"] < rounds[0]["bytes_down"] / 3  # A sign has 8 bits of 32.
        identity = json.loads((run / "identity.json").read_text())
        assert {"sync.codec signs:Signs", "outer_optimizer.name heavy_ball:HeavyBall"} <= identity.keys()
        repeat(run, tmp_path / "elsewhere", head)
        with (place / "heavy_ball.py").open("a") as file:
            file.write("# changed\n")
        again = run_job("--resume", "own", "--rounds.update_rounds", "4")
        assert again.returncode == 5 and "CKPT007" in again.stderr and "heavy_ball" in again.stderr


def repeat(run: Path, place: Path, head: str) -> None:
    """Repeat a run from another folder, which has none of its modules; its rounds have the same weights.

    The command that the new run tells is a whole one: it goes on with that run.
    """
    place.mkdir()
    (place / "jobs").symlink_to(ROOT / "jobs")
    with jobs_in(run.parent, place, head) as run_job:
        done = run_job(run.name, "--run.name", "again", "--anyway", script="rerun")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"run: {run.with_name('again')}"
        assert hashes(run.with_name("again")) == hashes(run) and len(hashes(run)) == 3
    account = json.loads((run.with_name("again") / "provenance.json").read_text())
    _, script, *words = account["command"]
    assert Path(script).name == "diloco.py" and account["folder"] == str(run.parents[1] / "beside")
    with jobs_in(run.parent, Path(account["folder"]), head) as run_job:
        done = run_job(*words)
        assert done.returncode == 0 and "run again has all of its 3 rounds" in done.stderr, done.stderr


def hashes(run: Path) -> list[str]:
    """The sha256 of the weights after each round."""
    records = [json.loads(file.read_text()) for file in sorted((run / "commits").glob("round_*.json"))]
    return [record["theta_sha256"] for record in records]


@pytest.mark.parametrize("name", ["not_here:Codec", "int9"])
def test_job_with_a_codec_that_is_not_there_is_refused(small_job: Path, head: str, tmp_path: Path, name: str) -> None:
    with jobs_in(tmp_path / "home", ROOT, head) as run_job:
        done = run_job("@", small_job, "--sync.codec", name, "--dry-run")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error[") and "Traceback" not in done.stderr
