"""Pairs of texts: source and target are whole, ended and padded, and their loss is that of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    T5Config,
    T5ForConditionalGeneration,
)

from hypha_ray.data.manifest import Manifest
from hypha_ray.data.report import lengths_of, marked, sample_of
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.configuration import resolve_task
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks import find_task
from tests.support.prepared import arrays_of, omissions, prepared, table

COLUMNS = {"source_column": "en", "target_column": "de", "validation_fraction": 0.0}


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepared(source, out, **{**COLUMNS, **options})


def ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()] + [1]


def test_source_and_target_end_and_are_padded_each_to_their_longest(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"en": "two", "de": "zwei"}, {"en": "three", "de": "</s>"})
    manifest = run(source, tmp_path / "out")
    assert manifest.shapes == {"input_ids": (6,), "attention_mask": (6,), "labels": (5,)}
    arrays = arrays_of(tmp_path / "out")
    rows = sorted(zip(*(arrays[name].tolist() for name in ("attention_mask", "input_ids", "labels")), strict=True))
    assert rows == [
        ([1, 1, 1, 1, 0, 0], [*ids("two"), 0, 0], ids("zwei")),
        ([1] * 6, ids("three"), ids("</s>")),
    ]


def test_long_texts_are_cut_off_before_their_end_token_and_counted(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"en": "abcdefgh", "de": "xyz"}, {"en": "ab", "de": "x"})
    manifest = run(source, tmp_path / "out", seq_len=4)
    assert sorted(arrays_of(tmp_path / "out")["input_ids"].tolist()) == [[*ids("ab"), 0], ids("abc")]
    assert omissions(manifest) == {"tokens behind the first 4 of a text, see --seq-len": 5}
    assert manifest.origin is not None and "1 pair cut off at --seq-len 4" in manifest.origin.notes


def test_loss_of_pairs_is_that_of_transformers(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", *({"en": "x" * n, "de": "y" * (9 - n)} for n in range(1, 9)))
    run(source, tmp_path / "out")
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=384, decoder_start_token_id=0, **sizes)).eval()
    batch = {name: torch.from_numpy(array) for name, array in arrays_of(tmp_path / "out").items()}
    task = resolve_task(find_task("seq2seq-lm"), model, None, explicit=False)
    inputs = task.inputs(batch)
    with torch.no_grad():
        ours = compute_losses(task, model, inputs).reported
        theirs = model(**{name: tensor.long() for name, tensor in batch.items()}).loss
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)
    assert task.count(inputs) == sum(9 - n + 1 for n in range(1, 9))


def test_language_behind_the_end_stays_there_since_mbart_begins_with_it(tmp_path: Path) -> None:
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdef"]
    tokenizer = MBartTokenizer(vocab=[(piece, -1.0) for piece in pieces], src_lang="en_XX", tgt_lang="ro_RO")
    tokenizer.save_pretrained(tmp_path / "mbart")
    source = table(tmp_path / "a.jsonl", {"en": "ab", "de": "c"}, {"en": "abcdef", "de": "fed"})
    run(source, tmp_path / "out", tokenizer=str(tmp_path / "mbart"), seq_len=6)
    arrays = arrays_of(tmp_path / "out")
    made = {
        tuple(tokenizer.convert_ids_to_tokens(row[mask == 1].tolist()))
        for row, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)
    }
    assert made == {("▁", "a", "b", "</s>", "en_XX"), ("▁", "a", "b", "c", "</s>", "en_XX")}
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": len(tokenizer)}
    model = MBartForConditionalGeneration(MBartConfig(**sizes, **heads)).eval()
    plain = tokenizer(["ab", "abc"], text_target=["c", "fed"], padding=True, return_tensors="pt")
    plain["labels"][plain["labels"] == tokenizer.pad_token_id] = -100
    task = resolve_task(find_task("seq2seq-lm"), model, None, explicit=False)
    with torch.no_grad():
        theirs = model(**plain).loss
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        ours = compute_losses(task, model, task.inputs(batch)).reported
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)


def test_rows_without_text_are_counted_and_equal_sources_are_in_one_split(tmp_path: Path) -> None:
    rows = [{"en": f"{n % 20}", "de": f"{n}"} for n in range(60)]
    source = table(tmp_path / "a.jsonl", *rows, {"en": " ", "de": "x"}, {"en": "x", "de": None})
    manifest = run(source, tmp_path / "out", validation_fraction=0.2)
    assert omissions(manifest) == {"rows without text in en": 1, "rows without text in de": 1}
    splits = (arrays_of(tmp_path / "out", name)["input_ids"] for name in ("train", "validation"))
    train, held = ({row.tobytes() for row in split} for split in splits)
    assert (len(train), len(held), train & held) == (16, 4, set())


def test_report_counts_targets_and_shows_one_though_sources_are_as_long(tmp_path: Path) -> None:
    manifest = run(
        table(tmp_path / "a.jsonl", {"en": "two", "de": "owt"}, {"en": "ten", "de": "net"}), tmp_path / "out"
    )
    found = lengths_of(tmp_path / "out", manifest, are_pairs=True)
    assert (found.tokens, found.scored) == (8, 8)
    shown = marked(sample_of(tmp_path / "out", manifest, are_pairs=True), coloured=False).plain
    assert shown in ("two</s>«owt</s>»", "ten</s>«net</s>»")


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"en": "x"}, r"DATA032.*line 1 has no column 'de' — got en\. Fix: name one with --target-column"),
    ({"en": 7, "de": "x"}, r"DATA031.*line 1: column 'en' is of no use — got int, allowed text.*--source-column"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_row_that_is_no_pair_is_refused_by_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        run(table(tmp_path / "a.jsonl", row), tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_column": None}, "--source-column and --target-column belong together"),
        ({"chat": True}, "--chat and --source-column exclude each other"),
        ({"label_column": "l"}, "--source-column and --label-column exclude each other"),
        ({"source": "stdlib"}, "--source-column has no effect on --source stdlib"),
    ],
)
def test_option_of_pairs_that_cant_be_used_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**{"source": "a.jsonl", "out": tmp_path / "out", **options})
