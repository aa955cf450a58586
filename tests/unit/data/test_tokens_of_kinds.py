"""Texts and prompts have the tokens that a plain tokenizer makes, framed as the manifest says, whatever its kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.manifest import Manifest
from tests.support.prepared import arrays_of, prepared, table
from tests.support.small_tokenizers import MAKERS

TEXTS = ["say red", "Q: 10 + 1= 11", " two  cat\n", "é☃ <s></s>[SEP]", "A"]
CHATTY = ("chatml", "llama3", "gemma", "mistral", "lines")


def run(folder: Path, tokenizer: Any, column: str, **options: Any) -> Manifest:
    tokenizer.save_pretrained(folder / "tokenizer")
    source = table(folder / "rows.jsonl", *({column: text} for text in TEXTS))
    given = {"tokenizer": str(folder / "tokenizer"), "validation_fraction": 0.0, **options}
    return prepared(source, folder / "out", **given)


def body(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text alone, in which special tokens are plain text."""
    found: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_each_document_is_framed_by_begin_and_end(tmp_path: Path, name: str) -> None:
    tokenizer = MAKERS[name]()
    manifest = run(tmp_path, tokenizer, "text", seq_len=2)
    assert manifest.tokens is not None
    begin, ends = list(manifest.tokens.begin), list(manifest.tokens.ends)
    expected = [token for text in TEXTS for token in (*begin, *body(tokenizer, text), *ends)]
    found = arrays_of(tmp_path / "out")["input_ids"].reshape(-1).tolist()
    # Samples are shuffled, and a last token that fills none is left out.
    assert len(expected) - len(found) in (0, 1)
    assert [token for token in set(found) if found.count(token) > expected.count(token)] == []


@pytest.mark.parametrize("name", MAKERS)
def test_prompts_are_what_the_tokenizer_makes_without_an_end(tmp_path: Path, name: str) -> None:
    tokenizer = MAKERS[name]()
    manifest = run(tmp_path, tokenizer, "q", prompt_column="q")
    assert manifest.tokens is not None
    arrays = arrays_of(tmp_path / "out")
    found = [row[mask == 1].tolist() for row, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]
    whole = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in TEXTS]
    end = {"ends": [tokenizer.eos_token_id], "wordpiece": [tokenizer.sep_token_id]}.get(name, [])
    assert sorted(found) == sorted(ids[: len(ids) - len(end)] for ids in whole)
    assert all(ids[len(ids) - len(end) :] == end for ids in whole)


@pytest.mark.parametrize("name", CHATTY)
def test_prompts_in_a_template_are_what_the_tokenizer_makes_of_a_chat(tmp_path: Path, name: str) -> None:
    tokenizer = MAKERS[name]()
    run(tmp_path, tokenizer, "q", prompt_column="q", chat=True)
    arrays = arrays_of(tmp_path / "out")
    found = [row[mask == 1].tolist() for row, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    expected = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("name", MAKERS)
def test_size_of_the_vocabulary_is_the_tokenizers(tmp_path: Path, name: str) -> None:
    tokenizer = MAKERS[name]()
    manifest = run(tmp_path, tokenizer, "q", prompt_column="q")
    assert manifest.tokens is not None
    assert manifest.tokens.vocab_size == len(tokenizer) == 1 + max(tokenizer.get_vocab().values())
