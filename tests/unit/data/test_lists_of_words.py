"""Lists of words have the tokens of the text that the words make, and each label stands at its own word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from hypha_ray.data.encoders import byte_tokenizer
from tests.support.prepared import arrays_of, omissions, prepared, table
from tests.support.small_tokenizers import MAKERS, bare

WORDS = ["red", "blue", "cat"]
ROWS = [{"text": WORDS, "tags": ["X", "Y", "Z"]}, {"text": WORDS[::-1], "tags": ["Z", "Y", "X"]}]
OPTIONS: dict[str, Any] = {"label_column": "tags", "validation_fraction": 0.0}


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
