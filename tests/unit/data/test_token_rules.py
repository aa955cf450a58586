"""Decisions about tokens: begin, ends and tokens between are those of tokenizer and template, in every dataset."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from hypha_ray.data.encoders import begin_of
from hypha_ray.data.manifest import Manifest, TokenRules
from hypha_ray.errors import DataError
from tests.support.prepared import arrays_of, prepared, table
from tests.support.small_tokenizers import CHATML, MAKERS, bare, begins, chatml, llama3

CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"red {n}"}]}
    for n in range(6)
]
QUESTIONS = [{"q": f"Q: {n}+2=", "a": f" {n + 2}"} for n in range(6)]
COMPLETIONS = {"prompt_column": "q", "completion_column": "a"}
TEXTS = ["say red", "Q: 10 + 1= 11", " two  cat\n", "é☃ <s></s>[SEP]", "A"]
CHATTY = ("chatml", "llama3", "gemma", "mistral", "lines")


def run(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]], **options: Any) -> Manifest:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = table(tmp_path / "rows.jsonl", *rows)
    return prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), seq_len=64, **options)


def rows_of(tmp_path: Path) -> list[list[int]]:
    """Ids of all training samples without their padding."""
    arrays = arrays_of(tmp_path / "out")
    return [ids[mask == 1].tolist() for ids, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]


def notes(manifest: Manifest) -> str:
    assert manifest.origin is not None
    return "\n".join(manifest.origin.notes)


@pytest.mark.parametrize(
    ("name", "begin"),
    {"begins": ["<s>"], "llama3": ["<|begin_of_text|>"], "gemma": ["<bos>"], "mistral": ["<s>"], "wordpiece": ["[CLS]"]}
    .items(),
)  # fmt: skip
def test_begin_is_what_the_tokenizer_itself_puts_before_a_text(name: str, begin: list[str]) -> None:
    tokenizer = MAKERS[name]()
    assert tokenizer.convert_ids_to_tokens(list(begin_of(tokenizer))) == begin


@pytest.mark.parametrize("name", ["ends", "bare", "chatml", "prefixed", "unigram", "bytes", "lines"])
def test_begin_is_empty_if_the_tokenizer_puts_nothing_before_a_text(name: str) -> None:
    assert begin_of(MAKERS[name]()) == ()


def test_begin_token_stands_before_each_document(tmp_path: Path) -> None:
    tokenizer = begins()
    texts = [f"say {number} red" for number in range(40)]
    manifest = run(tmp_path, tokenizer, [{"text": text} for text in texts], validation_fraction=0.0)
    rows = arrays_of(tmp_path / "out")["input_ids"].tolist()
    behind = [second for row in rows for first, second in pairwise(row) if first == tokenizer.eos_token_id]
    before = [first for row in rows for first, second in pairwise(row) if second == tokenizer.bos_token_id]
    assert set(behind) == {tokenizer.bos_token_id} and set(before) == {tokenizer.eos_token_id}
    assert manifest.tokens == TokenRules((0,), (1,), len(tokenizer), None)


def test_begin_token_stands_before_prompt_and_completion_and_isnt_scored(tmp_path: Path) -> None:
    tokenizer = begins()
    manifest = run(tmp_path, tokenizer, QUESTIONS, validation_fraction=0.0, **COMPLETIONS)
    expected = [tokenizer(row["q"])["input_ids"] + tokenizer(row["a"]).input_ids[1:] + [1] for row in QUESTIONS]
    assert sorted(rows_of(tmp_path)) == sorted(expected)
    assert (arrays_of(tmp_path / "out")["labels"][:, 0] == -100).all()
    assert manifest.tokens == TokenRules((0,), (1,), len(tokenizer), None)


def test_begin_token_stands_before_prompts_for_rewards(tmp_path: Path) -> None:
    tokenizer = begins()
    manifest = run(tmp_path, tokenizer, QUESTIONS, validation_fraction=0.0, prompt_column="q", answer_column="a")
    assert sorted(rows_of(tmp_path)) == sorted(tokenizer(row["q"])["input_ids"] for row in QUESTIONS)
    assert manifest.tokens == TokenRules((0,), (1,), len(tokenizer), None)


@pytest.mark.parametrize("pack", [False, True])
def test_begin_token_that_template_and_tokenizer_both_add_stands_once_in_a_chat(tmp_path: Path, pack: bool) -> None:
    tokenizer = llama3()
    manifest = run(tmp_path, tokenizer, CHATS, chat=True, pack=pack, validation_fraction=0.0)
    begin = tokenizer.bos_token_id
    assert (arrays_of(tmp_path / "out")["input_ids"] == begin).sum() == len(CHATS)
    assert manifest.tokens is not None and manifest.tokens.begin == (begin,)
    assert manifest.tokens.ends == (tokenizer.convert_tokens_to_ids("<|eot_id|>"),)


def test_end_of_chats_of_a_base_model_is_the_token_that_ends_its_turns(tmp_path: Path) -> None:
    tokenizer = chatml()
    manifest = run(tmp_path, tokenizer, CHATS, chat=True)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end != tokenizer.eos_token_id
    template = hashlib.sha256(CHATML.encode()).hexdigest()
    assert manifest.tokens == TokenRules((), (end,), len(tokenizer), template)
    assert "won't stop" not in notes(manifest)
    told = run(tmp_path, tokenizer, CHATS, chat=True, system="Be brief.", overwrite=True)
    assert told.tokens == TokenRules((), (end,), len(tokenizer), template, "Be brief.")


@pytest.mark.parametrize("special", [True, False])
def test_end_of_turns_that_has_no_role_in_the_tokenizer_ends_answers(tmp_path: Path, special: bool) -> None:
    """The line break that ChatML has behind it isn't an answer's end, and isn't scored."""
    tokenizer = bare()
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in ("<|im_start|>", "<|im_end|>")])
    tokenizer.chat_template = CHATML
    manifest = run(tmp_path, tokenizer, CHATS, chat=True)
    assert manifest.tokens is not None
    assert tokenizer.convert_ids_to_tokens(list(manifest.tokens.ends)) == ["<|im_end|>"]
    assert "won't stop" not in notes(manifest)
    for labels in arrays_of(tmp_path / "out")["labels"]:
        assert tokenizer.decode(labels[labels != -100][-1:]) == "<|im_end|>"


def test_templates_of_which_none_is_the_default_are_refused(tmp_path: Path) -> None:
    tokenizer = chatml()
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    for columns in ({}, {"prompt_column": "messages"}):
        with pytest.raises(DataError, match=r"DATA034.*none is the default.*rag, tool_use.*--chat-template"):
            run(tmp_path, tokenizer, CHATS, chat=True, **columns)


def test_template_with_the_date_is_noted(tmp_path: Path) -> None:
    tokenizer = chatml()
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + CHATML
    assert "today's date" in notes(run(tmp_path, tokenizer, CHATS, chat=True))
    assert "today's date" in notes(run(tmp_path, tokenizer, QUESTIONS, chat=True, prompt_column="q", overwrite=True))


def test_ends_of_prompts_in_a_template_are_those_of_turns_and_of_texts(tmp_path: Path) -> None:
    tokenizer = chatml()
    manifest = run(tmp_path, tokenizer, QUESTIONS, chat=True, prompt_column="q")
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    assert manifest.tokens is not None and manifest.tokens.ends == ends


def test_answers_with_two_kinds_of_ends_have_both_the_frequent_one_first(tmp_path: Path) -> None:
    tokenizer = chatml()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "{{ eos_token if 'stop' in m.content else '<|im_end|>' }}")
    rows = [*CHATS, {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "stop"}]}]
    manifest = run(tmp_path, tokenizer, rows, chat=True)
    assert manifest.tokens is not None
    assert tokenizer.convert_ids_to_tokens(list(manifest.tokens.ends)) == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("mark", "contents", "note"),
    [
        ("", "{} red", "no answer ends in a special token, so a trained model won't stop"),
        ("<|im_end|>", "{} red", ""),
        ("", "{} red<|im_end|>", ""),
        ("{{ '<|im_end|>' if '1' in m.content }}", "{} red", "5 answers of 6 end in no special token"),
    ],
)
def test_answers_without_an_end_are_told_of(tmp_path: Path, mark: str, contents: str, note: str) -> None:
    tokenizer = chatml()
    body = "{{ m.role }}: {{ m.content }}"
    tokenizer.chat_template = "{% for m in messages %}" + body + mark + "{{ '\n' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    messages = [
        [{"role": "user", "content": "say"}, {"role": "assistant", "content": contents.format(n)}] for n in range(6)
    ]
    manifest = run(tmp_path, tokenizer, [{"messages": chat} for chat in messages], chat=True)
    assert note in notes(manifest) and ("stop" in notes(manifest)) == bool(note)


def test_unknown_text_at_the_end_of_an_answer_is_no_end(tmp_path: Path) -> None:
    source = table(tmp_path / "rows.jsonl", *CHATS)
    tokenizer = MAKERS["wordpiece"]()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} ☃{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    manifest = prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), chat=True)
    assert manifest.tokens is not None and manifest.tokens.ends == ()
    assert "won't stop" in notes(manifest)


def test_texts_with_labels_and_translations_have_rules_too(tmp_path: Path) -> None:
    rows = [{"text": f"say {n}", "label": n % 2, "to": f"{n}"} for n in range(6)]
    labelled = run(tmp_path, MAKERS["wordpiece"](), rows, label_column="label")
    assert labelled.tokens == TokenRules((2,), (), len(MAKERS["wordpiece"]()), None)
    source = table(tmp_path / "pairs.jsonl", *rows)
    pairs = prepared(source, tmp_path / "pairs", source_column="text", target_column="to")
    assert pairs.tokens == TokenRules((), (1,), 384, None)


def test_size_of_a_vocabulary_with_a_gap_covers_its_largest_id(tmp_path: Path) -> None:
    tokenizer = bare()
    largest = max(tokenizer.get_vocab().values())
    manifest = run(tmp_path, tokenizer, QUESTIONS, **COMPLETIONS)
    assert manifest.tokens is not None and manifest.tokens.vocab_size == largest + 1


def test_datasets_without_tokens_have_no_rules(tmp_path: Path) -> None:
    assert prepared("digits", tmp_path / "out", max_samples=40).tokens is None


def run_on_texts(folder: Path, tokenizer: Any, column: str, **options: Any) -> Manifest:
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
    manifest = run_on_texts(tmp_path, tokenizer, "text", seq_len=2)
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
    manifest = run_on_texts(tmp_path, tokenizer, "q", prompt_column="q")
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
    run_on_texts(tmp_path, tokenizer, "q", prompt_column="q", chat=True)
    arrays = arrays_of(tmp_path / "out")
    found = [row[mask == 1].tolist() for row, mask in zip(arrays["input_ids"], arrays["attention_mask"], strict=True)]
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    expected = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("name", MAKERS)
def test_size_of_the_vocabulary_is_the_tokenizers(tmp_path: Path, name: str) -> None:
    tokenizer = MAKERS[name]()
    manifest = run_on_texts(tmp_path, tokenizer, "q", prompt_column="q")
    assert manifest.tokens is not None
    assert manifest.tokens.vocab_size == len(tokenizer) == 1 + max(tokenizer.get_vocab().values())
