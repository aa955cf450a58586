"""Trained ids are those of the prompt alone, and behind them those of the answer, whatever the tokenizer does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from hypha_ray.data.manifest import Manifest
from tests.support.prepared import arrays_of, prepared, table
from tests.support.small_tokenizers import (
    MAKERS,
    bare,
    begins,
    chatml,
    gemma,
    lines,
    llama3,
    mistral,
    prefixed,
    unigram,
)

COMPLETIONS = {"prompt_column": "q", "completion_column": "a", "validation_fraction": 0.0}
QUESTIONS = ("Q: red + two=", "Q: red + two= ", "Q: red\n", "Q: red\n\n", "Q", "say red ", "say  ")
ANSWERS = ("10", " 10", "\n10", "\n\n12", "two cat", "  two", "A: é☃", "10 \n")


class Row(NamedTuple):
    """A sample without padding."""

    ids: list[int]
    prompt: list[int]
    """Ids before the first label."""
    scored: list[int]
    """Ids with a label."""


def rows_of(out: Path) -> Iterator[Row]:
    arrays = arrays_of(out)
    names = ("input_ids", "attention_mask", "labels")
    for ids, mask, labels in zip(*(arrays[name] for name in names), strict=True):
        whole = ids[mask == 1].tolist()
        yield Row(whole, whole[: (labels != -100).argmax()], labels[labels != -100].tolist())


def run(folder: Path, tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> tuple[Manifest, list[Row]]:
    tokenizer.save_pretrained(folder / "tokenizer")
    source = table(folder / "rows.jsonl", *rows)
    given = {"tokenizer": str(folder / "tokenizer"), "seq_len": 128, **options}
    manifest = prepared(source, folder / "out", **given)
    return manifest, list(rows_of(folder / "out"))


def body(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def notes(manifest: Manifest) -> str:
    assert manifest.origin is not None
    return "\n".join(manifest.origin.notes)


# ── prompts with completions ──────────────────────────────────────────────────────────────────────────────────────

BYTE_LEVEL = ("begins", "ends", "bare", "chatml", "llama3", "gemma", "bytes")
"""Tokenizers that make the same tokens of a text wherever it stands."""
SPACED = ("mistral", "prefixed", "unigram")
"""Tokenizers that put a space before a text."""


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_completions_have_the_tokens_of_prompt_alone_and_answer_alone(tmp_path: Path, name: str) -> None:
    tokenizer, rows = MAKERS[name](), [{"q": q, "a": a} for q in QUESTIONS for a in ANSWERS]
    manifest, samples = run(tmp_path, tokenizer, rows, **COMPLETIONS)
    assert manifest.tokens is not None
    begin, end = list(manifest.tokens.begin), list(manifest.tokens.ends)
    expected = [(begin + body(tokenizer, row["q"]), body(tokenizer, row["a"]) + end) for row in rows]
    assert sorted((row.prompt, row.scored) for row in samples) == sorted(expected)
    joined = sum(
        body(tokenizer, row["q"] + row["a"]) != body(tokenizer, row["q"]) + body(tokenizer, row["a"]) for row in rows
    )
    assert (f"{joined} chats would have other tokens" in notes(manifest)) == bool(joined)
    assert bool(joined) == (name != "bytes")


@pytest.mark.parametrize("name", SPACED)
def test_completions_get_no_space_that_isnt_in_them(tmp_path: Path, name: str) -> None:
    tokenizer, rows = MAKERS[name](), [{"q": q, "a": a} for q in QUESTIONS for a in ANSWERS]
    manifest, samples = run(tmp_path, tokenizer, rows, **COMPLETIONS)
    assert manifest.tokens is not None
    begin, end = list(manifest.tokens.begin), list(manifest.tokens.ends)
    prompts = {tuple(begin + body(tokenizer, row["q"])) for row in rows}
    assert {tuple(row.prompt) for row in samples} == prompts
    assert all(row.scored[-1:] == end for row in samples)
    decoded = sorted(tokenizer.decode(row.ids[len(begin) : -1]).removeprefix(" ") for row in samples)
    # A character without a token is decoded as one of an unknown text, as in a text of its own.
    whole = (tokenizer.decode(body(tokenizer, row["q"] + row["a"])).removeprefix(" ") for row in rows)
    assert decoded == sorted(whole)


@pytest.mark.parametrize(
    ("maker", "question", "answer", "expected"),
    [
        (bare, "Q: ", "10", ["Q", ":", "Ġ", "10", "<|endoftext|>"]),
        (bare, "Q:", " 10", ["Q", ":", "Ġ10", "<|endoftext|>"]),
        (bare, "Q:\n", "\n10", ["Q", ":", "Ċ", "Ċ", "10", "<|endoftext|>"]),
        (begins, "Q: ", "10", ["<s>", "Q", ":", "Ġ", "10", "</s>"]),
        (prefixed, "Q: ", "10", ["ĠQ", ":", "Ġ", "10", "</s>"]),
        (prefixed, "Q:", "10", ["ĠQ", ":", "10", "</s>"]),
        (unigram, "Q: ", "10", ["▁Q", ":", "▁", "10", "</s>"]),
        (unigram, "Q:", "10", ["▁Q", ":", "10", "</s>"]),
        (unigram, "Q:", " 10", ["▁Q", ":", "▁10", "</s>"]),
        (mistral, "Q: ", "10", ["<s>", "▁Q", ":", "▁", "10", "</s>"]),
        (mistral, "Q 1", "0", ["<s>", "▁Q", "▁", "1", "0", "</s>"]),
        (gemma, "Q: ", "10", ["<bos>", "Q", ":", "▁", "10", "<eos>"]),
        (MAKERS["wordpiece"], "Q: ", "10", ["[CLS]", "Q", ":", "10", "[SEP]"]),
        (MAKERS["wordpiece"], "say re", "d", ["[CLS]", "say", "r", "##e", "d", "[SEP]"]),
    ],
)  # fmt: skip
def test_answer_begins_behind_the_tokens_of_its_prompt(
    tmp_path: Path, maker: Any, question: str, answer: str, expected: list[str]
) -> None:
    tokenizer, rows = maker(), [{"q": question, "a": answer}, {"q": "other", "a": "other"}]
    _, samples = run(tmp_path, tokenizer, rows, **COMPLETIONS)
    assert expected in [tokenizer.convert_ids_to_tokens(row.ids) for row in samples]


# ── templates ─────────────────────────────────────────────────────────────────────────────────────────────────────

TEMPLATED = {"chatml": chatml, "llama3": llama3, "gemma": gemma, "mistral": mistral, "lines": lines}
SAID = ("10", "two cat", "\nred", "\n\nred", "red \n")


@pytest.mark.parametrize("name", TEMPLATED)
def test_chats_have_the_tokens_of_the_generation_prompt_alone(tmp_path: Path, name: str) -> None:
    tokenizer = TEMPLATED[name]()
    asked = [{"role": "user", "content": f"say red {place}"} for place in range(len(SAID))]
    rows = [
        {"messages": [question, {"role": "assistant", "content": text}]}
        for question, text in zip(asked, SAID, strict=True)
    ]
    manifest, samples = run(tmp_path, tokenizer, rows, chat=True, validation_fraction=0.0)
    prompts = [
        tokenizer.apply_chat_template([question], add_generation_prompt=True, return_dict=False) for question in asked
    ]
    assert sorted(row.prompt for row in samples) == sorted(prompts)
    assert manifest.tokens is not None
    ends = {row.scored[-1] for row in samples}
    assert ends == set(manifest.tokens.ends)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "lines"])
def test_answers_in_chats_have_the_tokens_of_their_own_text(tmp_path: Path, name: str) -> None:
    tokenizer = TEMPLATED[name]()
    rows = [{"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": text}]} for text in SAID]
    _, samples = run(tmp_path, tokenizer, rows, chat=True, validation_fraction=0.0)
    rendered = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows]
    opened = [
        tokenizer.apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True) for row in rows
    ]
    answers = [
        body(tokenizer, text.removeprefix(before).rstrip("\n")) for text, before in zip(rendered, opened, strict=True)
    ]
    assert sorted(row.scored for row in samples) == sorted(answers)


def test_template_whose_generation_prompt_ends_in_a_space_is_tokenised_apart(tmp_path: Path) -> None:
    tokenizer = lines()
    rows = [{"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "red"}]}]
    manifest, samples = run(tmp_path, tokenizer, [*rows, *rows], chat=True, validation_fraction=0.0)
    tokens = tokenizer.convert_ids_to_tokens(samples[0].ids)
    assert tokens == ["user", ":", "Ġsay", "Ċ", "assistant", ":", "Ġ", "red", "<|endoftext|>", "Ċ"]
    assert "2 chats would have other tokens" in notes(manifest)


def test_each_answer_of_a_long_chat_is_tokenised_apart(tmp_path: Path) -> None:
    tokenizer = chatml()
    turns = [{"role": ("user", "assistant")[n % 2], "content": "\nred" if n % 2 else "say"} for n in range(6)]
    _, samples = run(tmp_path, tokenizer, [{"messages": turns}] * 2, chat=True, validation_fraction=0.0)
    question = body(tokenizer, "<|im_start|>user\nsay<|im_end|>\n<|im_start|>assistant\n")
    answer = body(tokenizer, "\nred<|im_end|>")
    line = body(tokenizer, "\n")
    assert samples[0].ids == (question + answer + line) * 3
    assert samples[0].scored == answer * 3


def test_text_behind_a_special_token_keeps_the_space_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = mistral()
    tokenizer.chat_template = (
        "{% for m in messages %}[INST] {{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[INST] assistant\n{% endif %}"
    )
    turns = [{"role": ("user", "assistant")[n % 2], "content": "red"} for n in range(4)]
    manifest, samples = run(tmp_path, tokenizer, [{"messages": turns}] * 2, chat=True, validation_fraction=0.0)
    whole = tokenizer.apply_chat_template(turns, return_dict=False)
    assert samples[0].ids == whole
    assert "other tokens" not in notes(manifest)


def test_rows_that_one_tokenization_would_not_change_have_no_note(tmp_path: Path) -> None:
    manifest, _ = run(tmp_path, bare(), [{"q": "Q:", "a": " 10"}, {"q": "A:", "a": " 10"}], **COMPLETIONS)
    assert "other tokens" not in notes(manifest)


def test_tokenizer_beside_the_slices_makes_the_trained_prompt(tmp_path: Path) -> None:
    _, samples = run(tmp_path, begins(), [{"q": "Q: ", "a": "10"}, {"q": "A: ", "a": "10"}], **COMPLETIONS)
    saved = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert sorted(row.prompt for row in samples) == sorted([saved("Q: ")["input_ids"], saved("A: ")["input_ids"]])


@pytest.mark.parametrize("marked", ["{% generation %}{{ '\n' ~ m.content }}<|im_end|>{% endgeneration %}", None])
def test_answer_whose_mark_is_elsewhere_begins_behind_the_generation_prompt(tmp_path: Path, marked: str | None) -> None:
    tokenizer = chatml()
    answer = marked or "\n\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'user' %}user\n{{ m.content }}<|im_end|>{% else %}assistant"
        + answer
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "\nred"}]
    _, samples = run(tmp_path, tokenizer, [{"messages": turns}] * 2, chat=True, validation_fraction=0.0)
    asked = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    rest = body(tokenizer, ("\nred" if marked else "\n\nred") + "<|im_end|>")
    assert samples[0].ids == asked + rest
