"""Classes of a dataset and of a model: whatever a repository was made for, and in whatever order its classes are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

from hypha_ray.config import Job
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.dataset_settings import by_number, relabelled, require_fitting_labels, with_classes
from hypha_ray.errors import DataError
from hypha_ray.model.build import build_model, task_of
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks import find_task
from tests.support.prepared import arrays_of, prepared, table


def run(source: Path, out: Path) -> Manifest:
    return prepared(source, out, label_column="label", validation_fraction=0.0)


def test_classes_take_the_place_of_what_a_repository_was_made_for(tmp_path: Path) -> None:
    """A model of scores, and one of several classes at once, become one of a class: transformers infers nothing."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    manifest = run(table(tmp_path / "a.jsonl", *({"text": name, "label": name} for name in "abc")), tmp_path / "out")
    for number, former in enumerate(("regression", "multi_label_classification")):
        config = BertConfig(vocab_size=32, num_labels=1 + number * 2, problem_type=former, **sizes)
        BertForSequenceClassification(config).save_pretrained(tmp_path / former)
        job = Job.model_validate({"model": {"repository": str(tmp_path / former), "type": "text-classification"}})
        model = with_classes(job, manifest).model
        network = build_model(model, 0).eval().requires_grad_(False)
        ids, labels = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([2, 0])
        task, inputs = task_of(model, network), {"input_ids": ids, "labels": labels}
        found = compute_losses(task, network, task.inputs(inputs)).reported
        assert float(found) == pytest.approx(float(cross_entropy(network(ids).logits, labels)), abs=1e-6)
        assert task.classifies


def test_labels_of_another_file_are_those_of_the_model_by_name(tmp_path: Path) -> None:
    """A file with two of a model's three classes has other numbers for them; names that a model lacks are refused."""
    trained = {0: "bad", 1: "fair", 2: "good"}
    task = replace(find_task("text-classification"), labels="samples")

    def found(*labels: Any, names: dict[int, str] = trained) -> Any:
        rows = [{"text": f"{n}", "label": label} for n, label in enumerate(labels)]
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        manifest = run(table(tmp_path / "a.jsonl", *rows), out)
        (arrays,) = relabelled([arrays_of(out)], manifest, task, names)
        texts = arrays["input_ids"][:, 0] - 3 - ord("0")
        return arrays["labels"][np.argsort(texts)].tolist()

    assert found("bad", "good", "bad") == [0, 2, 0]
    assert found(["good"], ["bad", "good"]) == [[0, 0, 1], [1, 0, 1]]
    assert found("x", "y") == [0, 1]  # No names in common: they say nothing, and a note says so.
    manifest = run(table(tmp_path / "a.jsonl", *({"text": name, "label": name} for name in "xy")), tmp_path / "xy")
    assert str(by_number(manifest, task, trained)).endswith("so classes go by number: x = bad, y = fair")
    assert by_number(manifest, task, {0: "y", 1: "z"}) is None
    assert found("good", "bad", names={0: "good", 1: "bad"}) == [0, 1]
    with pytest.raises(DataError, match="lacks classes") as caught:
        found("bad", "worse")
    assert (caught.value.code, caught.value.got) == ("DATA023", "worse")


@pytest.mark.parametrize(
    ("labels", "options"),
    [
        (("bad", "good"), {}),
        ((["bad"], ["bad", "good"]), {}),
        ((0.5, 1.5), {"regression": True}),
        ((["x", "y"], ["y", "x"]), {"text_column": "words"}),
    ],
    ids=["class", "several", "number", "tokens"],
)
def test_labels_of_another_kind_than_the_model_predicts_are_refused(
    tmp_path: Path, labels: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Transformers broadcasts numbers against classes, or takes the number of a class for a value, without an error."""
    rows = [{"text": f"{n}", "words": ["a", "b"], "label": label} for n, label in enumerate(labels)]
    source = table(tmp_path / "a.jsonl", *rows)
    manifest = prepared(source, tmp_path / "out", label_column="label", validation_fraction=0.0, **options)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    refusals = []
    for kind, classes, problem in (
        ("text-classification", 2, "single_label_classification"),
        ("text-classification", 2, "multi_label_classification"),
        ("text-classification", 1, None),
        ("token-classification", 2, None),
    ):
        config = {"model_type": "bert", "vocab_size": 400, "num_labels": classes, "problem_type": problem, **sizes}
        model = Job.model_validate({"model": {"config": config, "type": kind}}).model
        network = build_model(model, 0)
        try:
            require_fitting_labels(manifest, task_of(model, network), network.config)
        except DataError as error:
            assert error.code == "DATA023" and error.got != error.allowed
            refusals.append(error.got)
    assert len(refusals) == 3 and len(set(refusals)) == 1


def test_labels_of_tokens_are_renumbered_but_for_those_that_are_not_scored(tmp_path: Path) -> None:
    rows = [{"words": ["a", "b"], "label": ["place", "none"]}, {"words": ["c"], "label": ["none"]}]
    source = table(tmp_path / "a.jsonl", *rows)
    options: dict[str, Any] = {"text_column": "words", "label_column": "label", "validation_fraction": 0.0}
    manifest = prepared(source, tmp_path / "out", **options)
    labels = arrays_of(tmp_path / "out")["labels"]
    task = find_task("token-classification")
    (arrays,) = relabelled([{"labels": labels}], manifest, task, {0: "place", 1: "name", 2: "none"})
    assert sorted(labels[labels >= 0].tolist()) == [0, 0, 1] and labels.min() == -100
    assert arrays["labels"].tolist() == np.where(labels == 0, 2, np.where(labels == 1, 0, labels)).tolist()
