"""The whole examples of docs/plugins-training.md, written beside a job and used as a run does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hypha_ray.config.load import load
from hypha_ray.config.schema import Job, Model
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.slices import describe, write_slice
from hypha_ray.driver.evaluation import EvaluationRequest, ModelSource, evaluate_on_dataset
from hypha_ray.driver.preflight.checks import check_plugins
from hypha_ray.model.build import build_model, check_factory, skeleton, task_of
from hypha_ray.model.metrics import batches_of, evaluate, metrics_named, metrics_of
from hypha_ray.model.saved_model import export
from hypha_ray.rl.island import Island
from hypha_ray.types import Delta, Samples
from hypha_ray.worker.supervised import SupervisedTrainer
from tests.support.plugins import modules_beside
from tests.support.prepared import prepared
from tests.support.rl import BATCH, tokenizer
from tests.support.rl import job as rl_job
from tests.support.worker_bench import CONFIG, Bench, plan_of

PAGE = Path(__file__).parents[3] / "docs" / "plugins-training.md"
EXAMPLES = dict(re.findall(r"```python\n# (\w+)\.py.*?\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
"""Modules of the page by name."""
beside = modules_beside(**EXAMPLES)


def test_policy_is_trained_on_the_documented_loss_and_advantages() -> None:
    flags = {"loss": "cispo:Cispo", "loss_options.highest": 3.0, "advantage": "above_best:above_median"}
    job = rl_job(**flags)
    check_plugins(job)
    island = Island(job, tokenizer())
    before = [parameter.detach().clone() for parameter in island.model.parameters()]
    step = island.step(BATCH)
    island.close()
    assert step.scored and np.isfinite(float(step.loss))
    assert {"capped_share", "entropy"} <= step.sums.keys() and "clip_share" not in step.sums
    after = island.model.parameters()
    assert any(not one.equal(other) for one, other in zip(before, after, strict=True))


def test_preferences_are_trained_on_by_the_documented_loss() -> None:
    preference = {"loss": "slic:Hinge", "loss_options": {"distance": 2.0}}
    job = Job.model_validate({"model": {"config": CONFIG}, "preference": preference, "worker": {"device": "cpu"}})
    check_plugins(job)
    ids = np.arange(2 * 2 * 6, dtype=np.int32).reshape(2, 2, 6)
    arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": np.where(ids % 6 > 2, ids, -100)}
    trainer = SupervisedTrainer(job)
    losses = [float(trainer.step(Samples(arrays, np.zeros((2, 3), np.int64))).loss) for _ in range(3)]
    assert losses[0] == pytest.approx(2.0, abs=1e-6)  # The policy is its own reference at first.
    assert losses[2] < losses[1] < losses[0]


def test_documented_model_is_trained_on_the_documented_loss_and_has_the_documented_metric() -> None:
    table = {
        "factory": "mixer:build",
        "factory_options": {"vocab_size": 50, "hidden_size": 8},
        "loss": "smoothed:Smoothed",
        "loss_options": {"share": 0.2},
        "metrics": ["recall:Recall", "macro_f1"],
    }
    bench = Bench(model=table)
    check_plugins(bench.job)
    check_factory(bench.job.model, skeleton(bench.job.model))
    bench.run(plan_of(16))
    assert bench.of(Delta)[0].scored == 16 and np.abs(bench.weights).max() > 0

    network = build_model(bench.job.model, 0)
    task, metrics = task_of(bench.job.model, network), metrics_named(table["metrics"])
    figures = metrics_of(task, evaluate(network, task, batches_of([bench.slice], 8), "cpu", metrics=metrics), metrics)
    ids = torch.from_numpy(bench.slice["input_ids"]).long()
    with torch.no_grad():
        predicted = network.eval()(input_ids=ids).logits[:, :-1].argmax(-1)
    positive = ids[:, 1:] == 1
    assert figures["metric/Recall"] == pytest.approx(float((predicted[positive] == 1).float().mean()))
    assert figures["samples"] == 64 and "perplexity" not in figures


def test_documented_kind_makes_a_dataset_of_the_rows(tmp_path: Path) -> None:
    rows = [{"values": [number, number + 1, number + 2, number + 3]} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    manifest = prepared(source="rows.jsonl", out="windows", kind="windows:windows")
    assert manifest.shapes == {"past_values": (2,), "future_values": (2,)}
    assert manifest.samples("train") + manifest.samples("validation") == 20


def test_every_family_has_its_table_in_the_job_file() -> None:
    assert load(["--model.factory", "mixer:build"]).job.model == Model(factory="mixer:build")


def test_saved_model_is_evaluated_with_factory_loss_and_metrics_of_its_run(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 4, (10, 6))
    arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    data = tmp_path / "data"
    data.mkdir()
    slices = (write_slice(data, 0, "validation", arrays),)
    Manifest(name="digits", modality="language", slices=slices, tensors=describe(arrays, "slice")[1]).save(data)
    run = tmp_path / "run"
    run.mkdir()
    table = 'factory = "mixer:build"\nfactory_options = { vocab_size = 4, hidden_size = 8 }\nloss = "smoothed:Smoothed"'
    (run / "config.toml").write_text(f'[model]\n{table}\nmetrics = ["recall:Recall"]\n', encoding="utf-8")
    (run / "events.jsonl").touch()
    job = load(["@", str(run / "config.toml")]).job
    draws = np.random.default_rng(1)
    shapes = skeleton(job.model).state_dict().items()
    tensors = {name: draws.normal(size=tensor.shape).astype(np.float32) for name, tensor in shapes}
    export(job, None, tensors, run / "model")

    from mixer import Mixer

    network = Mixer.from_pretrained(run / "model")
    with torch.no_grad():
        logits, labels = network(torch.tensor(ids)).logits[:, :-1], torch.tensor(ids[:, 1:])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    hits = (logits.argmax(-1) == 1) & (labels == 1)
    request = EvaluationRequest(str(data), batch_size=3)
    _, figures = evaluate_on_dataset(request, ModelSource(run / "model"), lambda phase: None)
    assert figures["val_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert figures["metric/Recall"] == pytest.approx(float(hits.sum() / (labels == 1).sum()))
    assert "perplexity" not in figures and figures["samples"] == 10
    request = EvaluationRequest(str(data), metrics=["top5"])
    _, figures = evaluate_on_dataset(request, ModelSource(run / "model"), lambda phase: None)
    assert figures["metric/top5"] == 1.0 and "metric/Recall" not in figures


def test_model_beside_a_job_file_of_another_tool_lies_in_no_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[trainer]\nbase_model = "gpt2"\n', encoding="utf-8")
    (tmp_path / "model").mkdir()
    assert ModelSource(tmp_path / "model").job() is None
