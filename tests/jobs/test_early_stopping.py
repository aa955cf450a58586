"""Runs whose validation loss gets worse: they end early, keep their best weights, and count on after a kill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.job_scripts import Done, Jobs

ROUNDS, PATIENCE = 40, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of eight tokens; those held out have eight others, too, which get ever less likely."""
    folder, draws = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, tokens, samples in (("train", 8, 512), ("validation", 16, 16)):
        ids = draws.integers(3, 3 + tokens, (samples, 32), dtype=np.int32)
        save_file({"input_ids": ids, "attention_mask": np.ones_like(ids)}, folder / f"{name}.safetensors")
    return folder


def words(job: Path, data: Path, name: str, patience: int = PATIENCE) -> tuple[str | Path, ...]:
    rounds = ("--rounds.update_rounds", str(ROUNDS))
    ends = ("--rounds.patience", str(patience), "--checkpoint.best", "true", "--checkpoint.every_rounds", "50")
    return ("@", job, "--run.name", name, "--dataset.path", data, *rounds, *ends, "--outer_optimizer.name", "average")


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
    more = "1 more round" if patience == 1 else f"{patience} more rounds"
    reason = f"no better val_loss than {found[best]:.4g} after round {best + 1}, in {more}"
    assert read_jsonl(run / "events.jsonl", ["stop"])[-1]["reason"] == summary["ended_early"] == reason
    assert (summary["best_round"], summary["rounds"]) == (best, len(found))
    return reason


def score(run_job: Jobs, folder: Path, data: Path) -> float:
    done = succeeded(run_job("--model", folder, "--dataset", data, "--json", script="evaluate"))
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return float(found["val_loss"])


@pytest.fixture(scope="module")
def ended(run_shared_job: Jobs, small_job: Path, data: Path) -> tuple[Path, Done]:
    """A run that has ended early, and its command's output."""
    done = succeeded(run_shared_job(*words(small_job, data, "early")))
    return run_shared_job.home / "early", done


def test_run_ends_once_its_loss_gets_no_better_and_its_best_weights_are_kept(
    ended: tuple[Path, Done], run_shared_job: Jobs, data: Path, tmp_path: Path
) -> None:
    (run, done), found = ended, losses(ended[0])
    ended_after(found, PATIENCE)
    assert f"-- ended early: {told(run, PATIENCE)}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == f"run: {run}"
    assert score(run_shared_job, run / "model", data) == pytest.approx(found[-1], abs=1e-5)
    assert score(run_shared_job, run / "model-best", data) == pytest.approx(min(found), abs=1e-5)
    export = ("--run", "early", "--round", str(best_of(found) + 1), "--to", tmp_path / "best")
    succeeded(run_shared_job(*export, script="export"))
    best, exported = (load_file(folder / "model.safetensors") for folder in (run / "model-best", tmp_path / "best"))
    assert best and all((array == exported[name]).all() for name, array in best.items())


@pytest.mark.long
def test_run_that_has_ended_early_trains_on_with_more_patience_only(
    ended: tuple[Path, Done], run_shared_job: Jobs, small_job: Path, data: Path
) -> None:
    run, found = ended[0], losses(ended[0])
    again = succeeded(run_shared_job(*words(small_job, data, "early")))
    assert f"note: run early ended early: {told(run, PATIENCE)}" in again.stderr.splitlines()
    assert losses(run) == found
    more = ("--resume", "early", "--rounds.patience", str(PATIENCE + 2))
    succeeded(run_shared_job(*more))
    assert losses(run)[: len(found)] == found
    ended_after(losses(run), PATIENCE + 2)
    told(run, PATIENCE + 2)


@pytest.mark.long
def test_rounds_without_a_better_loss_are_counted_on_after_the_driver_is_killed(
    run_shared_job: Jobs, small_job: Path, data: Path
) -> None:
    run = run_shared_job.home / "killed"
    slow = ("--testing.slowdown", "10,10")  # Rounds are long enough to be seen before the next one ends.
    with run_shared_job.start(*words(small_job, data, "killed"), *slow) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if re.match(rf" *\d+/{ROUNDS} ", line) and waited(losses(run)) >= 2:
                break
        driver.kill()
    before = losses(run)
    assert 2 <= waited(before) < PATIENCE, "a part of the count is from before the kill"
    succeeded(run_shared_job("--resume", "killed", "--testing.slowdown", "1"))
    assert losses(run)[: len(before)] == before
    ended_after(losses(run), PATIENCE)
    told(run, PATIENCE)
