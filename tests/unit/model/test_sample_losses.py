"""Losses of samples that a user brings: they equal plain torch, and count each sample once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.model.build import build_model
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.model.loss_check import check_loss_on_copy
from hypha_ray.model.losses import compute_losses, with_own_loss
from hypha_ray.model.metrics import batches_of, evaluate, metrics_of
from hypha_ray.types import Delta, Samples
from hypha_ray.worker.incarnation import epoch_order
from tests.support.plugins import modules_beside
from tests.support.small_models import VIT
from tests.support.worker_bench import CONFIG, Bench, plan_of
from tests.unit.model.test_evaluation import images, ready

MODULE = """
import torch
from hypha_ray.plugins import Options


class Smoothed:
    class Options(Options):
        share: float = 0.1

    def __init__(self, options):
        self._share = options.share

    def __call__(self, output, inputs):
        logits, labels = output.logits[:, :-1].float().transpose(1, 2), inputs["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=self._share)
        return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def of_classes(output, inputs):
    return torch.nn.functional.cross_entropy(output.logits, inputs["labels"], reduction="none")


def mean(output, inputs):
    return of_classes(output, inputs).mean()


def raises(output, inputs):
    raise KeyError("lost")


def exits(output, inputs):
    raise SystemExit(1)


def changes(output, inputs):
    inputs["labels"].clamp_(max=1)
    return of_classes(output, inputs)


def detached(output, inputs):
    return of_classes(output, inputs).detach()


def undefined(output, inputs):
    return of_classes(output, inputs) * float("nan")


def steep(output, inputs):
    return (output.logits - output.logits).abs().sqrt().sum(-1)


def constant(output, inputs):
    return torch.zeros(len(inputs["labels"]))


def beside(output, inputs):
    losses = of_classes(output, inputs)
    return losses * losses.amax()
"""
LENGTHS = np.random.default_rng(1).choice([2, 3, 4, 16], 64)
GROUP = "parameters/float32"
LOSS = {"loss": "own_sample_losses:Smoothed", "loss_options": {"share": 0.25}}
beside = modules_beside(own_sample_losses=MODULE)


def bench_of(**tables: dict[str, Any]) -> Bench:
    bench = Bench(model={"config": CONFIG, **LOSS}, sync={"strategy": "sync"}, **tables)
    bench.slice["attention_mask"] = (np.arange(16)[None, :] < LENGTHS[:, None]).astype(np.int32)
    return bench.run(plan_of(32, batch=32))


@pytest.mark.parametrize("accumulation", [1, 5])
def test_gradient_is_that_of_the_mean_over_samples_however_they_are_cut(accumulation: int) -> None:
    bench = bench_of(rounds={"accumulation": accumulation})
    rows = epoch_order(0, 0, 0, 64)[:32]
    ids = torch.from_numpy(bench.slice["input_ids"][rows].astype(np.int64))
    mask = torch.from_numpy(bench.slice["attention_mask"][rows].astype(np.int64))
    model = build_model(bench.job.model, 0)
    logits = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits[:, :-1], -1)
    chosen = logits.gather(2, ids[:, 1:, None])[..., 0]
    smoothed = -(0.75 * chosen + 0.25 * logits.mean(-1)) * mask[:, 1:]
    loss = (smoothed.sum(1) / mask[:, 1:].sum(1)).mean()
    loss.backward()
    gradient = gather(model, layout_of(model), 0, gradients=True)[GROUP]

    delta = bench.of(Delta)[0]
    assert float(np.linalg.norm(bench.weights - gradient) / np.linalg.norm(gradient)) < 1e-5
    assert (delta.scored, delta.loss) == (32, pytest.approx(loss.item(), rel=1e-6))


@pytest.mark.parametrize("size", [1, 4, 11])
def test_evaluation_is_the_mean_over_samples_beside_the_accuracy(size: int) -> None:
    network, task = ready(VIT, "image-classification")
    arrays = images()
    arrays["labels"][3] = -100
    own = task.scored_by(lambda output, inputs: output.logits.square().sum(-1))
    found = metrics_of(own, evaluate(network, own, batches_of([arrays], size), "cpu"))
    plain = metrics_of(task, evaluate(network, task, batches_of([arrays], size), "cpu"))
    with torch.no_grad():
        expected = network.eval()(pixel_values=torch.from_numpy(arrays["images"])).logits.square().sum(-1).mean()

    assert found["val_loss"] == pytest.approx(float(expected))
    assert found["samples"] == 11 and plain["samples"] == 10
    assert found["accuracy"] == plain["accuracy"]


def test_language_models_have_no_perplexity_by_another_loss() -> None:
    model = Bench(model={"config": CONFIG, **LOSS}).job.model
    _, task = ready(CONFIG, "causal-lm")
    own = with_own_loss(task, model)
    assert task.perplexity and not own.perplexity
    assert (task.unit, own.unit) == ("tokens", "samples")


def classes(name: str) -> None:
    network, task = ready(VIT, "image-classification")
    model = load(["--model.repository", "x", "--model.loss", f"own_sample_losses:{name}"]).job.model
    keys = np.stack([np.zeros(11), np.zeros(11), np.arange(11)], axis=1).astype(np.int64)
    own = with_own_loss(task, model)
    assert check_loss_on_copy(own, Samples(images(), keys), network.config, lambda config: ready(VIT, own.name)[0], 1)


def test_loss_that_keeps_the_contract_is_accepted() -> None:
    classes("of_classes")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", r"MODEL025.*got \[\], allowed a loss of each sample, \[3\]"),
        ("raises", "MODEL025.*KeyError: 'lost'"),
        ("exits", "MODEL025.*SystemExit: 1"),
        ("changes", "MODEL025.*a change in place of labels"),
        ("detached", "MODEL025.*losses without a gradient"),
        ("undefined", "MODEL025.*losses or gradients that aren't finite"),
        ("steep", "MODEL025.*losses or gradients that aren't finite"),
        ("beside", "MODEL015"),
    ],
)
def test_loss_that_breaks_the_contract_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        classes(name)


def without_gradient(output: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.zeros(11)


def changing(output: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs["labels"][inputs["labels"] == -100] = 0
    return torch.nn.functional.cross_entropy(output.logits, inputs["labels"], reduction="none")


def popping(output: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits, inputs.pop("labels"), reduction="none")


@pytest.mark.parametrize(
    ("loss", "message"), [(without_gradient, "without a gradient"), (changing, "a change in place of labels")]
)
def test_loss_of_a_batch_that_breaks_the_contract_is_refused(loss: Any, message: str) -> None:
    network, task = ready(VIT, "image-classification")
    arrays = images()
    inputs = {"pixel_values": torch.from_numpy(arrays["images"]), "labels": torch.from_numpy(arrays["labels"]).long()}
    with pytest.raises(ConfigError, match=f"MODEL025.*{message}"):
        compute_losses(task.scored_by(loss), network, inputs)


def test_loss_that_takes_labels_out_of_its_inputs_leaves_figures_as_they_are() -> None:
    network, task = ready(VIT, "image-classification")
    batches = list(batches_of([images()], 4))
    plain = metrics_of(task, evaluate(network, task, batches, "cpu"))
    assert metrics_of(task, evaluate(network, task.scored_by(popping), batches, "cpu")) == pytest.approx(plain)


@pytest.mark.parametrize(
    "flags",
    [
        ["--worker.fused_loss", "true"],
        ["--rl.algorithm", "grpo"],
        ["--bridge.commands", "python train.py"],
    ],
)
def test_jobs_that_would_not_use_the_loss_refuse_it(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"CFG011.*model\.loss"):
        load(["--model.loss", "mine:loss", "--model.repository", "x", "--dataset.path", "x", *flags])
