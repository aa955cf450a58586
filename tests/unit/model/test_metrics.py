"""Metrics of evaluations: those of the package equal scikit-learn's, and sums merge whatever the division."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, top_k_accuracy_score

from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.figures import LOSS, figures_of, metric_figure, shown_beside, task_figures
from hypha_ray.model.metrics import batches_of, evaluate, metrics_named, metrics_of, scored_pairs
from hypha_ray.model.task import IGNORE_INDEX
from hypha_ray.model.tasks import find_task
from hypha_ray.plugins import attempt
from hypha_ray.scheduler.round_strategy import Evaluation
from hypha_ray.types import Evaluated, Source, Span, Sums, added
from tests.support.plugins import modules_beside
from tests.support.small_models import VIT
from tests.unit.model.test_evaluation import GPT2, images, ready, text

MODULE = """
import torch


class Scored:
    def sums(self, logits, labels):
        assert logits.ndim == 2 and labels.ndim == 1 and len(logits) == len(labels)
        return {"positions": len(labels), "loss": torch.nn.functional.cross_entropy(logits, labels, reduction="sum")}

    def figure(self, sums):
        return sums["loss"] / sums["positions"]


class Mean:
    def sums(self, logits, labels):
        return {"mean": (logits.argmax(-1) == labels).float().mean()}

    def figure(self, sums):
        return sums["mean"]


class Raises(Mean):
    def sums(self, logits, labels):
        raise KeyError("lost")


class Exits(Mean):
    def sums(self, logits, labels):
        raise SystemExit(1)


class Text(Scored):
    def figure(self, sums):
        return "good"


class Softens(Scored):
    def sums(self, logits, labels):
        return super().sums(logits.sub_(1.0), labels)


class Divides(Scored):
    def figure(self, sums):
        return 1 / 0
"""
beside = modules_beside(own_metrics=MODULE)


def sums_of(arrays: Mapping[str, np.ndarray], *names: str, size: int) -> Sums:
    network, task = ready(VIT, "image-classification")
    return evaluate(network, task, batches_of([arrays], size), "cpu", metrics=metrics_named(names))


@pytest.mark.parametrize("size", [1, 4, 11])
def test_metrics_of_the_package_equal_those_of_scikit_learn_however_batches_are_cut(size: int) -> None:
    arrays, names = images(), ("macro_f1", "top5")
    network, task = ready(VIT, "image-classification")
    with torch.no_grad():
        logits = network.eval()(pixel_values=torch.from_numpy(arrays["images"])).logits.numpy()
    figures = metrics_of(task, sums_of(arrays, *names, size=size), metrics_named(names))

    assert figures["metric/macro_f1"] == pytest.approx(f1_score(arrays["labels"], logits.argmax(1), average="macro"))
    expected = top_k_accuracy_score(arrays["labels"], logits, k=5, labels=range(10))
    assert figures["metric/top5"] == pytest.approx(expected)


def test_metrics_change_no_other_figure() -> None:
    plain, beside = sums_of(images(), size=4), sums_of(images(), "macro_f1", size=4)
    assert {name: sums for name, sums in beside.items() if not name.startswith("metric/")} == plain


def test_metrics_of_workers_merge_as_those_of_one() -> None:
    arrays, metrics = images(), metrics_named(["macro_f1"])
    whole = figures_of(sums_of(arrays, "macro_f1", size=4), False, {name: one.figure for name, one in metrics.items()})
    evaluation = Evaluation(3, {})
    for worker, rows in enumerate((slice(0, 2), slice(2, 11))):
        share = (Span(worker, 0, 0, 1),)
        evaluation.pending[worker] = share
        part = sums_of({name: array[rows] for name, array in arrays.items()}, "macro_f1", size=4)
        evaluation.take(Evaluated(Source("run", worker, 0), 3, part, 0.1))
    record = evaluation.record(False, {name: metric.figure for name, metric in metrics.items()})

    assert record is not None and record["count"] == 11
    assert record["metric/macro_f1"] == whole["metric/macro_f1"]
    assert not [name for name in record if name.count("/") > 1], "sums are no figures"


@pytest.mark.parametrize("fused", [False, True])
def test_language_models_have_metrics_of_the_scored_tokens(fused: bool) -> None:
    network, task = ready(GPT2, "causal-lm")
    head = network.get_output_embeddings() if fused else None  # type: ignore[operator]
    metrics = metrics_named(["own_metrics:Scored"])
    sums = evaluate(network, task, batches_of([text()], 4), "cpu", head=head, metrics=metrics)
    figures = metrics_of(task, sums, metrics)

    assert sums["metric/Scored/positions"][0] == sums["val_loss"][1]
    assert figures["metric/Scored"] == pytest.approx(figures["val_loss"])
    assert figures["perplexity"] is not None


def test_labels_that_are_ignored_have_no_part() -> None:
    task, labels = find_task("token-classification"), torch.tensor([[1, IGNORE_INDEX], [IGNORE_INDEX, 0]])
    logits, kept = scored_pairs(task, SimpleNamespace(logits=torch.arange(12.0).view(2, 2, 3)), {"labels": labels})
    assert kept.tolist() == [1, 0]
    assert logits.tolist() == [[0, 1, 2], [9, 10, 11]]


def test_metric_that_cannot_be_told_is_absent() -> None:
    sums = added([{"metric/Divides/loss": (1.0, 1.0)}])
    metrics = metrics_named(["own_metrics:Divides", "top5"])
    figures = figures_of(sums, False, {name: metric.figure for name, metric in metrics.items()})
    assert figures == {"metric/Divides": None, "metric/top5": None}


def test_metrics_are_shown_as_the_accuracy_is() -> None:
    evaluation = {"val_loss": 1.0, "accuracy": 0.5, metric_figure("mine:Kappa"): 0.25}
    assert task_figures(evaluation) == {"accuracy": 0.5, "metric/Kappa": 0.25}
    assert shown_beside(LOSS, evaluation) == ["accuracy", "metric/Kappa"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mean", "MODEL024.*mean: .* for two parts of a batch"),
        ("Raises", "MODEL024: model.metrics: Raises fails.*KeyError: 'lost'"),
        ("Exits", "MODEL024.*SystemExit: 1"),
        ("Text", "MODEL024.*a figure of type str"),
        ("Divides", "MODEL024.*ZeroDivisionError"),
        ("Softens", "MODEL024.*a change in place"),
    ],
)
def test_metric_that_breaks_the_contract_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("MODEL024:", r"MODEL024\]:")):
        attempt("model.metrics", "metrics", f"own_metrics:{name}", None, None)


@pytest.mark.parametrize("name", ["macro_f1", "top5", "own_metrics:Scored"])
def test_metric_that_keeps_the_contract_is_accepted(name: str) -> None:
    attempt("model.metrics", "metrics", name, None, None)


def test_models_without_logits_of_labels_have_no_metrics() -> None:
    with pytest.raises(ConfigError, match=r"MODEL024.*question-answering model has no logits for each label"):
        scored_pairs(find_task("question-answering"), SimpleNamespace(logits=None), {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rl.algorithm", "grpo"], "model.metrics.*rl.algorithm"),
        (["--bridge.commands", "python train.py"], "model.metrics.*bridge.commands"),
    ],
)
def test_jobs_whose_evaluations_have_no_logits_refuse_metrics(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(["--model.metrics", "top5", "--model.repository", "x", "--dataset.path", "x", *flags])


def test_metrics_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.metrics.*different names"):
        load(['--model.metrics=["mine:F1", "other:F1"]', "--model.repository", "x", "--dataset.path", "x"])


def test_mean_of_no_class_is_absent() -> None:
    assert math.isnan(metrics_named(["macro_f1"])["metric/macro_f1"].figure({}))
