"""Texts with numbers to predict, columns of classes, and second texts: samples and losses are those of transformers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizerFast,
    XLNetConfig,
    XLNetForSequenceClassification,
    XLNetTokenizer,
)

from hypha_ray.config import Job
from hypha_ray.data.manifest import ClassInfo, Manifest
from hypha_ray.driver.dataset_settings import with_classes
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.build import build_model, task_of
from hypha_ray.model.configuration import resolve_task
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.metrics import tensors_of
from hypha_ray.model.tasks import find_task
from hypha_ray.types import Samples
from tests.support.prepared import arrays_of, omissions, prepared, table

BERT = {
    "model_type": "bert",
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "walk", "in", "paris", "rain"]


@pytest.fixture
def bert(tmp_path: Path) -> str:
    """A tokenizer of BERT's kind: tokens of a second text have another type."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    BertTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepared(source, out, **{"validation_fraction": 0.0, **options})


def ours_and_theirs(out: Path, manifest: Manifest, labels: dict[str, Any], **texts: Any) -> tuple[float, float]:
    """Loss of the prepared samples, and transformers' loss of the texts with these labels."""
    job = Job.model_validate({"model": {"config": BERT, "type": "sequence-classification"}})
    job = with_classes(job, manifest)
    model = build_model(job.model, 0).eval()
    arrays = arrays_of(out)
    samples = Samples(arrays, torch.zeros(len(arrays["labels"]), 3).long().numpy())
    task = task_of(job.model, model, None)
    ours = compute_losses(task, model, task.inputs(tensors_of(samples))).reported
    theirs = AutoModelForSequenceClassification.from_config(model.config).eval()
    theirs.load_state_dict(model.state_dict())
    encoded = AutoTokenizer.from_pretrained(out / "tokenizer")(**texts, padding=True, return_tensors="pt")
    return ours.item(), theirs(**encoded, **labels).loss.item()


def test_regression_trains_on_the_numbers_of_a_column(tmp_path: Path, bert: str) -> None:
    texts, scores = ["good walk", "bad", "in paris rain"], [4.5, -1.25, 3.0]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "score"), *zip(texts, scores, strict=True)])
    options = {"label_column": "score", "regression": True, "tokenizer": bert}
    manifest = run(tmp_path / "a.csv", tmp_path / "out", **options)
    arrays = arrays_of(tmp_path / "out")
    assert manifest.classes is None and arrays["labels"].dtype == "float32"
    assert sorted(zip(arrays["input_ids"][:, 1].tolist(), arrays["labels"].tolist(), strict=True)) == [
        (4, 4.5),
        (5, -1.25),
        (7, 3.0),
    ]
    ours, theirs = ours_and_theirs(tmp_path / "out", manifest, {"labels": torch.tensor(scores)}, text=texts)
    assert abs(ours - theirs) < 1e-6


def test_columns_of_classes_are_several_labels_of_a_text(tmp_path: Path, bert: str) -> None:
    rows = [
        {"text": "good", "rude": 0, "late": "1"},
        {"text": "bad rain", "rude": True, "late": 1.0},
        {"text": "walk", "rude": "0.0", "late": False},
        {"text": "paris", "rude": None, "late": 0},
    ]
    options = {"label_columns": ["rude", "late"], "tokenizer": bert}
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", **options)
    assert manifest.classes == ClassInfo(("rude", "late"), several=True)
    assert omissions(manifest) == {"rows without a label": 1}
    marks = torch.tensor([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    texts = [row["text"] for row in rows[:3]]
    ours, theirs = ours_and_theirs(tmp_path / "out", manifest, {"labels": marks}, text=texts)
    assert abs(ours - theirs) < 1e-6


def test_second_texts_are_encoded_and_typed_as_the_tokenizer_does(tmp_path: Path, bert: str) -> None:
    rows = [
        {"text": "good walk", "claim": "rain", "label": "yes"},
        {"text": "bad", "claim": "in paris", "label": "no"},
        {"text": "rain", "claim": None, "label": "no"},
    ]
    options = {"label_column": "label", "second_column": "claim", "tokenizer": bert}
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", **options)
    arrays, tokenizer = arrays_of(tmp_path / "out"), AutoTokenizer.from_pretrained(bert)
    texts = {"text": ["good walk", "bad"], "text_pair": ["rain", "in paris"]}
    expected = tokenizer(**texts, padding=True, return_tensors="np")
    order = arrays["input_ids"][:, 1].argsort()
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        assert arrays[name][order].tolist() == expected[name].tolist()
    assert omissions(manifest) == {"rows without a second text": 1}
    ours, theirs = ours_and_theirs(tmp_path / "out", manifest, {"labels": torch.tensor([1, 0])}, **texts)
    assert abs(ours - theirs) < 1e-6


def test_long_pairs_are_cut_as_the_tokenizer_does_and_what_is_cut_off_is_counted(tmp_path: Path, bert: str) -> None:
    rows = [
        {"text": "good " * 9, "claim": "rain " * 5, "label": "a"},
        {"text": "bad", "claim": "paris", "label": "b"},
    ]
    options = {"label_column": "label", "second_column": "claim", "tokenizer": bert, "seq_len": 9}
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", **options)
    tokenizer = AutoTokenizer.from_pretrained(bert)
    cut = tokenizer("good " * 9, "rain " * 5, truncation=True, max_length=9)["input_ids"]
    assert cut in arrays_of(tmp_path / "out")["input_ids"].tolist()
    assert omissions(manifest) == {"tokens behind the first 9 of a text, see --seq-len": 17 - 9}


@pytest.mark.parametrize(
    ("rows", "options", "error"),
    [
        ([{"text": "x", "label": "high"}], {"regression": True}, "DATA031.*got high, allowed a finite number"),
        ([{"text": "x", "label": "nan"}], {"regression": True}, "DATA031.*a finite number"),
        ([{"text": "x", "label": 1e39}], {"regression": True}, "DATA031.*a finite number"),
        ([{"text": "x", "label": True}], {"regression": True}, "DATA031.*a finite number"),
        (
            [{"text": "x", "label": 2}, {"text": "y", "label": 2.0}],
            {"regression": True},
            "DATA039.*got 2, allowed di",
        ),
        ([{"text": ["x"], "label": 2.5}], {"regression": True}, "DATA037.*has a single label"),
        ([{"text": "x", "a": 2}], {"label_column": None, "label_columns": ["a"]}, "DATA031.*got 2, allowed 0 or 1"),
        ([{"text": "x"}], {"label_column": None, "label_columns": ["a"]}, "DATA032.*no column 'a'.*--label-columns"),
        ([{"text": "x", "label": "a", "b": 5}], {"second_column": "b"}, "DATA031.*column 'b' is of no use.*--second"),
    ],
)
def test_labels_of_no_use_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], error: str
) -> None:
    with pytest.raises(DataError, match=error):
        run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", **{"label_column": "label", **options})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"label_columns": ["a"], "label_column": "b"}, "PREP007.*--label-column and --label-columns exclude"),
        ({"label_columns": ["a"], "regression": True}, "PREP007.*--regression and --label-columns exclude"),
        ({"label_columns": ["a", "a"]}, "PREP001.*--label-columns is out of range"),
        ({"label_columns": ["a"], "chat": True}, "PREP007.*--chat and --label-columns exclude"),
        ({"regression": True}, "PREP007.*--regression has no effect on documents"),
        ({"second_column": "b"}, "PREP007.*--second-column has no effect on documents"),
        ({"label_column": "l", "second_column": "b"}, "PREP011.*'byte' puts no token between"),
    ],
)
def test_options_of_labels_that_exclude_each_other_are_refused(
    tmp_path: Path, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        run(table(tmp_path / "a.jsonl", {"text": "x", "l": "a", "b": "y"}), tmp_path / "out", **options)


def test_text_is_padded_on_the_left_where_its_last_token_classifies(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>", "▁", *"abcdef"]
    tokenizer = XLNetTokenizer(vocab=[(piece, -1.0) for piece in pieces])
    tokenizer.save_pretrained(tmp_path / "xlnet")
    texts = {"ab": "x", "fedcba": "y", "c": "y"}
    source = table(tmp_path / "a.jsonl", *({"text": text, "label": label} for text, label in texts.items()))
    run(source, tmp_path / "out", label_column="label", tokenizer=str(tmp_path / "xlnet"))
    torch.manual_seed(0)
    config = XLNetConfig(vocab_size=32, d_model=8, n_layer=1, n_head=2, d_inner=8, num_labels=2)
    model = XLNetForSequenceClassification(config).eval()
    plain = tokenizer(list(texts), padding=True, return_tensors="pt")
    task = resolve_task(find_task("sequence-classification"), model, None, explicit=False)
    batch = {name: torch.from_numpy(array) for name, array in arrays_of(tmp_path / "out").items()}
    with torch.no_grad():
        theirs = model(**plain, labels=torch.tensor([0, 1, 1])).loss
        ours = compute_losses(task, model, task.inputs(batch)).reported
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)
