"""Runs whose validation loss gets worse: they end early, keep their best weights, and count on after a kill."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.job_scripts import Done, Jobs

ROUNDS, PATIENCE = 40, 5


@pytest.fixture(scope="module")
def noise(run_shared_job: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random letters, which can be learned by heart only: what is held out gets ever less likely."""
    folder, draw = tmp_path_factory.mktemp("noise"), random.Random(0)
    rows = [json.dumps({"text": "".join(draw.choices("abcdefgh", k=31))}) for _ in range(80)]
    (folder / "noise.jsonl").write_text("\n".join(rows))
    words = ("--source", folder / "noise.jsonl", "--seq-len", "32", "--validation-fraction", "0.4")
    succeeded(run_shared_job(*words, "--out", folder / "data", script="prepare"))
    return folder / "data"


def words(job: Path, data: Path, name: str, patience: int = PATIENCE) -> tuple[str | Path, ...]:
    rounds = ("--rounds.update_rounds", str(ROUNDS), "--rounds.samples_between_updates", "512")
    ends = ("--rounds.patience", str(patience), "--checkpoint.best", "true", "--checkpoint.every_rounds", "50")
    rate = ("--inner_optimizer.learning_rate", "1e-2", "--outer_optimizer.name", "average")
    return ("@", job, "--run.name", name, "--dataset.path", data, *rounds, *ends, *rate)


def succeeded(done: Done) -> Done:
    assert done.returncode == 0, done.stderr
    return done


def losses(run: Path) -> list[float]:
    """Validation loss after each round; each is evaluated once."""
    records = read_jsonl(run / "metrics.jsonl", ["eval"])
    assert [record["round"] for record in records] == list(range(len(records)))
    return [record["val_loss"] for record in records]


def best_of(found: list[float]) -> int:
    return found.index(min(found))


def waited(found: list[float]) -> int:
    """Rounds since the best."""
    return len(found) - 1 - best_of(found) if found else 0


def ended_after(found: list[float], patience: int) -> None:
    """No better loss for so many rounds, and not sooner."""
    assert waited(found) == patience > max(waited(found[:end]) for end in range(len(found)))


def told(run: Path, patience: int) -> str:
    """Reason of the end, which is the same in the events and the summary."""
    found, summary = losses(run), json.loads((run / "summary.json").read_text())
    best = best_of(found)
    reason = f"no better val_loss than {found[best]:.4g} after round {best + 1}, in {patience} more rounds"
    assert read_jsonl(run / "events.jsonl", ["stop"])[-1]["reason"] == summary["ended_early"] == reason
    assert (summary["best_round"], summary["rounds"]) == (best, len(found))
    return reason


def score(run_job: Jobs, folder: Path, data: Path) -> float:
    done = succeeded(run_job("--model", folder, "--dataset", data, "--json", script="evaluate"))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return float(found["val_loss"])


def test_run_ends_once_its_loss_gets_no_better_and_its_best_weights_are_kept(
    run_shared_job: Jobs, small_job: Path, noise: Path, head: str, tmp_path: Path
) -> None:
    env = {"RAY_ADDRESS": head}
    done, run = succeeded(run_shared_job(*words(small_job, noise, "early"), env=env)), run_shared_job.home / "early"
    found = losses(run)
    ended_after(found, PATIENCE)
    assert f"-- ended early: {told(run, PATIENCE)}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == f"run: {run}"
    assert score(run_shared_job, run / "model", noise) == pytest.approx(found[-1], abs=1e-5)
    assert score(run_shared_job, run / "model-best", noise) == pytest.approx(min(found), abs=1e-5)
    export = ("--run", "early", "--round", str(best_of(found)), "--to", tmp_path / "best")
    succeeded(run_shared_job(*export, script="export"))
    best, exported = (load_file(folder / "model.safetensors") for folder in (run / "model-best", tmp_path / "best"))
    assert best and all((array == exported[name]).all() for name, array in best.items())
    again = succeeded(run_shared_job(*words(small_job, noise, "early"), env=env))
    assert f"note: run early ended early: {told(run, PATIENCE)}" in again.stderr.splitlines()
    assert losses(run) == found
    succeeded(run_shared_job("--resume", "early", "--rounds.patience", str(PATIENCE + 2), env=env))
    assert losses(run)[: len(found)] == found
    ended_after(losses(run), PATIENCE + 2)
    told(run, PATIENCE + 2)


def test_rounds_without_a_better_loss_are_counted_on_after_the_driver_is_killed(
    run_shared_job: Jobs, small_job: Path, noise: Path, head: str
) -> None:
    env = {"RAY_ADDRESS": head}
    run = run_shared_job.home / "killed"
    with run_shared_job.start(*words(small_job, noise, "killed"), env=env) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if re.match(rf" *\d+/{ROUNDS} ", line) and waited(losses(run)) >= 2:
                break
        driver.kill()
    before = losses(run)
    assert 2 <= waited(before) < PATIENCE, "a part of the count is from before the kill"
    succeeded(run_shared_job(*words(small_job, noise, "killed"), env=env))
    assert losses(run)[: len(before)] == before
    ended_after(losses(run), PATIENCE)
    told(run, PATIENCE)
