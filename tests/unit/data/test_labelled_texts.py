"""Labelled texts: names of classes are kept, labels are those of their texts or words, and none is lost unsaid."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from hypha_ray.config import Job
from hypha_ray.data.catalogue import load
from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.data.manifest import ClassInfo, Manifest
from hypha_ray.data.report import class_counts, lengths_of, marked, sample_of
from hypha_ray.driver.dataset_settings import with_classes
from hypha_ray.errors import ConfigError, DataError
from tests.support.prepared import arrays_of, omissions, prepared, table
from tests.support.small_tokenizers import MAKERS, bare

WORDS = ["red", "blue", "cat"]
ROWS = [{"text": WORDS, "tags": ["X", "Y", "Z"]}, {"text": WORDS[::-1], "tags": ["Z", "Y", "X"]}]
OPTIONS: dict[str, Any] = {"label_column": "tags", "validation_fraction": 0.0}


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepared(source, out, **{"label_column": "label", "validation_fraction": 0.0, **options})


def labelled(out: Path) -> set[tuple[str, int]]:
    """Text and label of each training sample."""
    arrays, tokenizer = arrays_of(out), AutoTokenizer.from_pretrained(out / "tokenizer")
    rows = zip(arrays["input_ids"], arrays["attention_mask"], arrays["labels"].tolist(), strict=True)
    return {(tokenizer.decode(ids[mask == 1].tolist()), label) for ids, mask, label in rows}


@pytest.fixture
def wordpiece(tmp_path: Path) -> str:
    """A tokenizer in the form of BERT's, with pieces of words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "walk", "##ing", "in", "paris"]
    tokenizer = Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path / "wordpiece")
    return str(tmp_path / "wordpiece")


# ── one label a text ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        (["pos", "neg", "pos"], ("neg", "pos"), [1, 0, 1]),
        ([5, 10, 1], ("1", "5", "10"), [1, 2, 0]),
        ([-1, 1, 0], ("-1", "0", "1"), [0, 2, 1]),
        ([True, False, True], ("False", "True"), [1, 0, 1]),
        ([2.0, 10.0, math.nan], ("2", "10"), [0, 1]),
        (["--1", "2"], ("--1", "2"), [0, 1]),
    ],
)
def test_classes_are_numbered_by_name_or_size(
    tmp_path: Path, labels: list[Any], names: tuple[str, ...], numbers: list[int]
) -> None:
    rows = [{"text": f"text {place}", "label": label} for place, label in enumerate(labels)]
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out")
    assert manifest.classes == load(tmp_path / "out").classes == ClassInfo(names)
    assert labelled(tmp_path / "out") == {(f"text {place}", number) for place, number in enumerate(numbers)}


def test_csv_has_the_text_in_its_only_other_column(tmp_path: Path) -> None:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "review", "label"), (1, "fine, really", "pos"), (2, "[1]", "neg")])
    manifest = run(tmp_path / "a.csv", tmp_path / "out")
    assert labelled(tmp_path / "out") == {("fine, really", 1), ("[1]", 0)}
    assert omissions(manifest) == {"columns not used; only text and label are": 1}


@pytest.mark.parametrize("kind", ["saved", "hub"])
def test_classes_of_a_hub_dataset_have_their_names(tmp_path: Path, kind: str) -> None:
    labels = datasets.ClassLabel(names=["low", "high", "never"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    rows = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features)
    folder = tmp_path / "rows"
    if kind == "saved":
        rows.save_to_disk(str(folder))
    else:
        folder.mkdir()
        rows.to_parquet(str(folder / "train.parquet"))
    manifest = run(folder, tmp_path / "out")
    assert manifest.classes == ClassInfo(("low", "high", "never"))
    assert labelled(tmp_path / "out") == {("a", 1), ("b", 0)}
    assert omissions(manifest) == {"rows without a label": 1}


def test_special_tokens_are_the_tokenizers_and_those_in_a_text_are_literal(tmp_path: Path, wordpiece: str) -> None:
    rows = [{"text": "good walking", "label": "a"}, {"text": "bad [SEP]", "label": "b"}]
    run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", tokenizer=wordpiece)
    arrays = arrays_of(tmp_path / "out")
    by_label = dict(zip(arrays["labels"].tolist(), arrays["input_ids"].tolist(), strict=True))
    assert by_label == {0: [2, 4, 6, 7, 3, 0], 1: [2, 5, 1, 1, 1, 3]}


def test_long_texts_keep_their_end_token_and_what_is_cut_off_is_counted(tmp_path: Path, wordpiece: str) -> None:
    rows = [{"text": "good " * 9, "label": "a"}, {"text": "bad", "label": "b"}]
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", tokenizer=wordpiece, seq_len=4)
    assert sorted(arrays_of(tmp_path / "out")["input_ids"].tolist()) == [[2, 4, 4, 3], [2, 5, 3, 0]]
    assert omissions(manifest) == {"tokens behind the first 4 of a text, see --seq-len": 7}
    assert manifest.origin is not None and "1 text cut off at --seq-len 4" in manifest.origin.notes


def test_rows_without_text_or_label_are_counted(tmp_path: Path) -> None:
    rows = [{"text": " ", "label": "a"}, {"text": "x", "label": None}, {"text": "y", "label": ""}]
    rows += [{"text": "w", "label": " "}, {"text": "z", "label": 0}, {"text": "v", "label": 1}]
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out")
    assert omissions(manifest) == {"rows without text": 1, "rows without a label": 3}
    assert labelled(tmp_path / "out") == {("z", 0), ("v", 1)}


def test_equal_texts_are_in_one_split_whatever_their_labels(tmp_path: Path) -> None:
    rows = [{"text": f"text {n % 20}", "label": n % 3} for n in range(60)]
    run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", validation_fraction=0.2)
    splits = (arrays_of(tmp_path / "out", name)["input_ids"] for name in ("train", "validation"))
    train, held = ({ids.tobytes() for ids in split} for split in splits)
    assert (len(train), len(held), train & held) == (16, 4, set())


# ── several labels, and labels of words ───────────────────────────────────────────────────────────────────────────


def test_several_labels_of_a_text_are_marks_for_each_class(tmp_path: Path) -> None:
    rows = [{"text": "aaa", "label": ["x", "z"]}, {"text": "bbb", "label": []}, {"text": "ccc", "label": ["y"]}]
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out")
    assert manifest.classes == ClassInfo(("x", "y", "z"), several=True)
    arrays = arrays_of(tmp_path / "out")
    found = {
        chr(ids[0] - 3): labels.tolist() for ids, labels in zip(arrays["input_ids"], arrays["labels"], strict=True)
    }
    assert found == {"a": [1, 0, 1], "b": [0, 0, 0], "c": [0, 1, 0]}
    assert class_counts(tmp_path / "out", manifest) == {"x": 1, "y": 1, "z": 1}
    assert lengths_of(tmp_path / "out", manifest).scored is None, "there are as many classes as tokens"


def test_label_of_a_word_is_at_its_first_token(tmp_path: Path, wordpiece: str) -> None:
    rows = [{"words": ["Walking", "in", "Paris"], "label": ["O", "O", "LOC"]}, {"words": ["good"], "label": ["O"]}]
    source = table(tmp_path / "a.jsonl", *rows)
    manifest = run(source, tmp_path / "out", tokenizer=wordpiece, text_column="words")
    assert manifest.classes == ClassInfo(("LOC", "O"))
    arrays = arrays_of(tmp_path / "out")
    found = sorted(zip(arrays["input_ids"].tolist(), arrays["labels"].tolist(), strict=True))
    assert found == [
        ([2, 4, 3, 0, 0, 0], [-100, 1, -100, -100, -100, -100]),
        ([2, 6, 7, 8, 9, 3], [-100, 1, -100, 1, 0, -100]),
    ]
    assert lengths_of(tmp_path / "out", manifest).scored == 4
    assert class_counts(tmp_path / "out", manifest) == {"LOC": 1, "O": 3}
    assert "«" in marked(sample_of(tmp_path / "out", manifest), coloured=False).plain


def test_names_of_word_labels_come_from_the_hub(tmp_path: Path) -> None:
    tags = datasets.Sequence(datasets.ClassLabel(names=["O", "B-PER"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "label": tags})
    rows = datasets.Dataset.from_dict({"tokens": [["Ann", "runs"]], "label": [[1, 0]]}, features)
    rows.save_to_disk(str(tmp_path / "rows"))
    manifest = run(tmp_path / "rows", tmp_path / "out", text_column="tokens")
    assert manifest.classes == ClassInfo(("O", "B-PER"))
    labels = arrays_of(tmp_path / "out")["labels"][0]
    assert labels[[0, 3]].tolist() == [1, 0] and (np.delete(labels, [0, 3]) == -100).all()


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────

BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"text": "x"}, r"DATA032.*line 2 has no column 'label'.*--label-column"),
    (
        {"text": 7, "label": 1},
        r"DATA031.*line 2: column 'text' is of no use — got int, allowed text, or a list of words",
    ),
    ({"text": "x", "label": 0.5}, r"DATA031.*line 2: column 'label'.*got float, allowed text or a whole number"),
    ({"text": "x", "label": ["a"]}, r"DATA037.*line 2: the labels are of another kind than those of .*line 1"),
    ({"text": "x", "label": ["a", " "]}, r"DATA031.*line 2: column 'label'.*got an empty label, allowed text"),
    ({"text": ["x", "y"], "label": "a"}, r"DATA037.*line 2: a list of words has a single label"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_row_without_a_usable_label_is_refused_by_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        run(table(tmp_path / "a.jsonl", {"text": "good", "label": 1}, row), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_words_without_as_many_labels_are_refused(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"text": ["a", "b"], "label": ["X"]})
    with pytest.raises(DataError, match=r"DATA037.*line 1: there isn't one label for each word — got 1 .*, allowed 2"):
        run(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("texts", "labels", "only"),
    [
        (["a", "b"], ["x", "x"], "'x'"),
        (["a", "b"], [1, 1], "'1'"),
        (["a", "b"], [["x", "y"], ["y", "x"]], "'x', 'y'"),
        (["a", "b"], [[], []], "none"),
        ([["a", "b"], ["c"]], [["O", "O"], ["O"]], "'O'"),
    ],
)
def test_labels_that_are_all_the_same_are_refused(
    tmp_path: Path, texts: list[Any], labels: list[Any], only: str
) -> None:
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    with pytest.raises(DataError, match=rf"DATA039.*a.jsonl are the same — got {only}, allowed at least two classes"):
        run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_of_the_classes_of_a_hub_dataset_is_refused(tmp_path: Path) -> None:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, 1]}, features).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(DataError, match=r"DATA039.*got 'b', allowed at least two classes"):
        run(tmp_path / "rows", tmp_path / "out")


def test_a_class_that_some_texts_have_and_others_lack_is_learned(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": ["x"]}, {"text": "b", "label": []}]
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out")
    assert manifest.classes == ClassInfo(("x",), several=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chat": True}, "--chat and --label-column exclude each other"),
        ({"prompt_column": "q"}, "--prompt-column and --label-column exclude each other"),
        ({"source": "stdlib"}, "--label-column has no effect on --source stdlib"),
    ],
)
def test_label_column_beside_other_kinds_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**{"source": "a.jsonl", "out": tmp_path / "out", **options})


# ── the model's classes ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("several", [False, True])
def test_model_has_the_classes_of_the_dataset(tmp_path: Path, several: bool) -> None:
    rows = [{"text": name, "label": [name] if several else name} for name in ("b", "a")]
    manifest = run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out")
    job = Job.model_validate({"model": {"repository": "x/y", "type": "text-classification"}})
    config = with_classes(job, manifest).model.config
    problem = "multi_label_classification" if several else "single_label_classification"
    assert config == {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "problem_type": problem}


@pytest.mark.parametrize(
    "model", [{"type": "causal-lm"}, {"type": "text-classification", "config": {"model_type": "bert", "num_labels": 5}}]
)
def test_model_without_classes_or_with_its_own_stays_as_it_is(tmp_path: Path, model: dict[str, Any]) -> None:
    manifest = run(table(tmp_path / "a.jsonl", *({"text": name, "label": name} for name in "ab")), tmp_path / "out")
    job = Job.model_validate({"model": model})
    assert with_classes(job, manifest) == job


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "ends"])
def test_words_have_the_tokens_of_their_text_and_a_label_each(tmp_path: Path, name: str) -> None:
    tokenizer = MAKERS[name]()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = table(tmp_path / "rows.jsonl", *ROWS)
    prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), **OPTIONS)
    arrays = arrays_of(tmp_path / "out")
    ids = [row[mask == 1].tolist() for row, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]
    assert sorted(ids) == sorted(tokenizer(" ".join(row["text"]))["input_ids"] for row in ROWS)
    assert sorted(row[row != -100].tolist() for row in arrays["labels"]) == [[0, 1, 2], [2, 1, 0]]


def test_words_of_a_vocabulary_of_characters_are_separated_by_a_space_that_it_has(tmp_path: Path) -> None:
    source = table(tmp_path / "rows.jsonl", *ROWS)
    manifest = prepared(source, tmp_path / "out", tokenizer="characters", **OPTIONS)
    ids = arrays_of(tmp_path / "out")["input_ids"]
    assert manifest.tokens is not None and manifest.tokens.vocab_size == 3 + len(set("redbluecat "))
    assert (ids == 2).sum() == 0 and (ids == 3).sum() == 4  # No unknown character, and a space before four words.


def test_labels_of_words_without_tokens_are_counted(tmp_path: Path) -> None:
    tokenizer = bare()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [*ROWS, {"text": ["red", "", "cat", ""], "tags": ["X", "Y", "Z", "X"]}]
    source = table(tmp_path / "rows.jsonl", *rows)
    manifest = prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), **OPTIONS)
    assert omissions(manifest) == {"labels of words without tokens": 2}
    assert (arrays_of(tmp_path / "out")["labels"] != -100).sum() == 3 + 3 + 2


def test_words_that_are_cut_off_arent_counted_as_words_without_tokens(tmp_path: Path) -> None:
    source = table(tmp_path / "rows.jsonl", *ROWS)
    manifest = prepared(source, tmp_path / "out", seq_len=5, **OPTIONS)
    assert not any("without tokens" in name for name in omissions(manifest))


# ── ByT5's own tokenizer ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("spare", [125, 7])
def test_saved_byt5_folder_makes_the_labelled_texts_of_byt5(tmp_path: Path, spare: int) -> None:
    reference = ByT5Tokenizer(extra_ids=spare)
    reference.save_pretrained(tmp_path / "byt5")
    rows = [{"text": text, "label": len(text) % 2} for text in ("Hi", "é☃ </s>", "a b c")]
    source = table(tmp_path / "rows.jsonl", *rows)
    options: dict[str, Any] = {"label_column": "label", "validation_fraction": 0.0}
    manifest = prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "byt5"), **options)
    arrays = arrays_of(tmp_path / "out")
    found = {tuple(row[mask == 1]) for row, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)}
    assert found == {tuple(reference(row["text"], split_special_tokens=True)["input_ids"]) for row in rows}
    assert manifest.tokens is not None and manifest.tokens.vocab_size == len(reference) == 259 + spare


@pytest.mark.parametrize("maker", [ByT5Tokenizer, byte_tokenizer])
def test_saved_folder_with_a_tokenizer_of_bytes_makes_the_completions_of_byte(tmp_path: Path, maker: Any) -> None:
    maker().save_pretrained(tmp_path / "saved")
    source = table(tmp_path / "rows.jsonl", *({"q": f"{n}+1=", "a": str(n + 1)} for n in range(6)))
    columns: dict[str, Any] = {"prompt_column": "q", "completion_column": "a"}
    for name, tokenizer in (("plain", "byte"), ("again", str(tmp_path / "saved"))):
        prepared(source, tmp_path / name, tokenizer=tokenizer, **columns)
    plain, again = arrays_of(tmp_path / "plain"), arrays_of(tmp_path / "again")
    for name, array in plain.items():
        np.testing.assert_array_equal(again[name], array)
