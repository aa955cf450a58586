"""A run that keeps its best model: what is saved is the model of the best evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hypha_ray.data.catalogue import load
from hypha_ray.data.slices import read_slice
from hypha_ray.model.evaluation import batches_of, evaluate, metrics_of
from hypha_ray.model.saved_model import open_saved
from tests.support.jobs import job_of, run_job

pytestmark = pytest.mark.usefixtures("local_ray")


def test_best_model_has_the_loss_of_the_best_evaluation_although_training_went_on(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"outer_optimizer": {"learning_rate": 3.0, "momentum": 0.9}}  # They overshoot after a few rounds.
    job = job_of("best", corpus, rounds={"update_rounds": 8}, checkpoint={"best": True, "keep": 1}, **rates)
    run = run_job(job, tmp_path, corpus, export=True)
    losses = {record["round"]: record["val_loss"] for record in run.of_kind("eval")}
    best = min(losses, key=lambda number: losses[number])
    assert len(losses) == 8
    network, task = open_saved(run.directory / "model-best")
    manifest = load(corpus)
    infos = manifest.of("validation")
    slices = (read_slice(corpus, info, manifest) for info in infos)
    sums = evaluate(network, task, batches_of(slices, 32, [info.index for info in infos]), torch.device("cpu"))
    assert metrics_of(task, sums)["val_loss"] == pytest.approx(losses[best], rel=1e-5)
    assert f"note: model-best is the model after round {best + 1}, with val_loss" in capsys.readouterr().err
    kept = sorted(int(path.name[-6:]) for path in (run.directory / "checkpoints").glob("round_*"))
    assert kept == sorted({best, 7})
