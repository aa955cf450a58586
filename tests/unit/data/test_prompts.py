"""Datasets of prompts: texts and records survive, splits have no prompt in common, and nothing is left out silently."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hypha_ray.data.catalogue import load
from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.data.kinds.kind import split
from hypha_ray.data.kinds.prompts import preview
from hypha_ray.data.manifest import MANIFEST, Manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.data.provenance import Account
from hypha_ray.data.slices import Arrays, read_slice
from hypha_ray.data.sources.prompts import ALPHABET, gym_entries, problems
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.rl.rewards.response import pack_records, unpack_records

TEMPLATE = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<extra_id_1>{% endif %}"
)
OPENING = "{% if add_generation_prompt %}<extra_id_0>assistant:{% endif %}"


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepare(PrepareOptions(str(source), out, **options), lambda what, number: None)


def table(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(path: Path, count: int = 40) -> Path:
    return table(path, *({"q": f"{number} + 1?", "a": number + 1} for number in range(count)))


def arrays_of(out: Path, name: str) -> Arrays:
    manifest = load(out)
    parts = [read_slice(out, info, manifest) for info in manifest.of(name)]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]} if parts else {}


def tokenizer_of(out: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(out / "tokenizer")


def texts_of(out: Path, name: str) -> list[str]:
    arrays, tokenizer = arrays_of(out, name), tokenizer_of(out)
    pairs = zip(arrays.get("input_ids", []), arrays.get("attention_mask", []), strict=True)
    return [tokenizer.decode(ids[mask == 1].tolist()) for ids, mask in pairs]


def records_of(out: Path, *names: str) -> list[dict[str, Any]]:
    return [record for name in names for record in unpack_records(arrays_of(out, name)["reward_data"])]


def omissions(manifest: Manifest) -> dict[str, int]:
    assert manifest.origin is not None
    return {f"{one.what} {one.reason}": one.count for one in manifest.origin.omissions}


# ── generated problems ────────────────────────────────────────────────────────────────────────────────────────────

SOLUTIONS = {
    "copy": lambda text: text,
    "reverse": lambda text: "".join(text[len(text) - 1 - place] for place in range(len(text))),
    "sort": lambda text: "".join(digit * text.count(digit) for digit in "0123456789"),
    "max": lambda text: next(digit for digit in "9876543210" if digit in text),
    "sums": lambda text: str(eval(text)),
    "remainders": lambda text: str(eval(text))[-1],
}


@pytest.mark.parametrize("kind", SOLUTIONS)
@pytest.mark.parametrize("digits", [1, 2, 5, 9])
def test_answers_of_problems_are_right(kind: str, digits: int) -> None:
    found = list(islice(problems(f"{kind}{digits}", seed=digits), 200))
    for prompt, answer in found:
        assert answer == SOLUTIONS[kind](prompt.removesuffix("=").lstrip("0") if "+" in prompt else prompt[:-1])
        assert set(prompt + answer) <= set(ALPHABET)
    longest = max(len(number) for prompt, _ in found for number in prompt[:-1].split("+"))
    assert longest == digits


@pytest.mark.parametrize(("short", "whole"), [("sort", "sort2"), ("max", "max2"), ("sums", "sums1")])
def test_problems_without_a_number_have_the_usual_one(short: str, whole: str) -> None:
    assert list(islice(problems(short, 3), 50)) == list(islice(problems(whole, 3), 50))


def test_problems_are_those_of_their_seed() -> None:
    first, again, other = (list(islice(problems("sums3", seed), 50)) for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.parametrize(
    ("name", "words"),
    [("sotr2", r"did you mean 'sort'"), ("chess", r"copy, reverse, sort, max, sums, remainders"), ("sort0", "1 to 9")],
)
def test_unknown_problems_name_those_there_are(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"DATA030.*{name}.*{words}"):
        run(f"problems:{name}", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_problems_become_a_dataset_whose_answers_are_right(tmp_path: Path) -> None:
    manifest = run("problems:sort2", tmp_path / "out", tokenizer="characters", max_documents=1000)
    assert (manifest.modality, manifest.shapes["input_ids"]) == ("prompts", (3,))
    assert {tensor.name: tensor.dtype for tensor in manifest.tensors} == {
        "input_ids": "int32",
        "attention_mask": "int32",
        "reward_data": "uint8",
    }
    for name in ("train", "validation"):
        for text, record in zip(texts_of(tmp_path / "out", name), records_of(tmp_path / "out", name), strict=True):
            assert record == {"task": "sort2", "answer": "".join(sorted(text[:2]))} and text[2:] == "="
    assert manifest.preprocessor is not None and manifest.preprocessor.vocab_size == len(ALPHABET) + 3
    held, trained = set(texts_of(tmp_path / "out", "validation")), set(texts_of(tmp_path / "out", "train"))
    assert (len(held), len(trained), held & trained) == (5, 95, set())


def test_same_options_give_the_same_bytes_and_another_seed_gives_others(tmp_path: Path) -> None:
    found = []
    for name, seed in (("a/d", 0), ("b/d", 0), ("c/d", 1)):
        run("problems:sums2", tmp_path / name, tokenizer="characters", max_documents=300, seed=seed)
        found.append({path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()})
    assert found[0] == found[1] != found[2]


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(str.strip)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte", "characters"])
@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=12))
def test_every_prompt_and_every_answer_survives(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: str, rows: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    source = table(folder / "a.jsonl", *({"q": question, "a": answer} for question, answer in rows))
    out = folder / "out"
    run(source, out, prompt_column="q", answer_column="a", tokenizer=tokenizer, samples_per_slice=5)
    found = Counter[tuple[str, str]]()
    for name in ("train", "validation"):
        if load(out).of(name):
            answers = [record["answer"] for record in records_of(out, name)]
            found.update(zip(texts_of(out, name), answers, strict=True))
    wanted = Counter((question, answer.strip()) for question, answer in rows)
    assert found <= wanted and found.total() + left_out_of(load(out)) == wanted.total()


def left_out_of(manifest: Manifest) -> int:
    return sum(count for what, count in omissions(manifest).items() if what.startswith("prompts "))


def test_prompts_are_padded_on_the_left_to_the_longest(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"q": "a"}, {"q": "abc"})
    run(source, tmp_path / "out", prompt_column="q", validation_fraction=0.0)
    arrays = arrays_of(tmp_path / "out", "train")
    rows = sorted(zip(arrays["input_ids"].tolist(), arrays["attention_mask"].tolist(), strict=True))
    assert rows == [([0, 0, 100], [0, 0, 1]), ([100, 101, 102], [1, 1, 1])]
    assert records_of(tmp_path / "out", "train") == [{"task": "exact"}] * 2


def test_special_tokens_in_a_prompt_are_taken_literally(tmp_path: Path) -> None:
    run(table(tmp_path / "a.jsonl", {"q": "</s>"}, {"q": "b"}), tmp_path / "out", prompt_column="q")
    assert arrays_of(tmp_path / "out", "train")["input_ids"].max() > 2
    assert set(texts_of(tmp_path / "out", "train") + texts_of(tmp_path / "out", "validation")) == {"</s>", "b"}


@pytest.mark.parametrize("suffix", ["csv", "parquet", "saved"])
def test_prompts_of_every_kind_of_table(tmp_path: Path, suffix: str) -> None:
    rows = datasets.Dataset.from_dict({"id": [1, 2], "question": ["one?", "two?"], "answer": ["1", "2"]})
    source = tmp_path / f"rows.{suffix}"
    {"csv": rows.to_csv, "parquet": rows.to_parquet, "saved": rows.save_to_disk}[suffix](str(source))
    manifest = run(source, tmp_path / "out", prompt_column="question", answer_column="answer", validation_fraction=0.0)
    assert sorted(texts_of(tmp_path / "out", "train")) == ["one?", "two?"]
    assert sorted(record["answer"] for record in records_of(tmp_path / "out", "train")) == ["1", "2"]
    assert omissions(manifest) == {"columns not used; only prompt and answer are": 1}


GSM8K = "She sold 48/2 = <<48/2=24>>24.\nTogether 48+24 = 72.\n#### "


def test_numbers_of_a_column_that_lacks_some_are_those_that_were_written(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"q": ["a", "b", "c"], "a": [72, None, 3], "b": [Decimal("1.50"), None, Decimal(7)]})
    frame.to_parquet(tmp_path / "a.parquet")
    for column, wanted in (("a", ["3", "72"]), ("b", ["1.50", "7.00"])):
        out = tmp_path / column
        run(tmp_path / "a.parquet", out, prompt_column="q", answer_column=column, validation_fraction=0.0)
        assert sorted(record["answer"] for record in records_of(out, "train")) == wanted


@pytest.mark.parametrize(
    ("task", "answer", "wanted"),
    [
        ("gsm8k", GSM8K + "72", "72"),
        ("gsm8k", GSM8K + "1,234", "1234"),
        ("gsm8k", GSM8K + "-0.5 ", "-0.5"),
        ("gsm8k", "72", None),
        ("number", "it is 3, no: 4.50 apples", "4.50"),
        ("number", 7, "7"),
        ("number", "many", None),
        ("number", "1.5e5", "150000"),
        ("number", "1e999999999", "1E+999999999"),
        ("math", r" \frac{1}{2} ", r"\frac{1}{2}"),
        (None, 0, "0"),
        (None, -72.0, "-72"),
        (None, 0.1, "0.1"),
        (None, 1e-05, "0.00001"),
        (None, 1e16, "10000000000000000"),
        (None, math.nan, None),
    ],
)
def test_answer_is_what_the_task_compares(tmp_path: Path, task: str | None, answer: Any, wanted: str | None) -> None:
    source = table(tmp_path / "a.jsonl", {"q": "first", "a": answer}, {"q": "other", "a": "#### 1"})
    how: dict[str, Any] = {"prompt_column": "q", "answer_column": "a", "validation_fraction": 0.0}
    manifest = run(source, tmp_path / "out", task=task, **how)
    pairs = zip(texts_of(tmp_path / "out", "train"), records_of(tmp_path / "out", "train"), strict=True)
    found = {text: record for text, record in pairs if text == "first"}
    assert found == ({} if wanted is None else {"first": {"task": task or "exact", "answer": wanted}})
    assert sum(omissions(manifest).values()) == (wanted is None)


def test_answer_pattern_gives_its_group_and_rows_without_it_are_counted(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"q": "x", "a": r"so \boxed{7}."}, {"q": "y", "a": "8"})
    how: dict[str, Any] = {"prompt_column": "q", "answer_column": "a", "answer_pattern": r"\\boxed\{(.*?)\}"}
    manifest = run(source, tmp_path / "out", task="math", **how)
    assert records_of(tmp_path / "out", "train") == [{"task": "math", "answer": "7"}]
    assert omissions(manifest) == {"rows answer without the pattern": 1}


def test_other_columns_are_kept_for_rewards(tmp_path: Path) -> None:
    kept = {"tests": ["f(1) == 2", "f(2) == 3"], "level": 3, "meta": {"unit": "é", "none": None}}
    run(table(tmp_path / "a.jsonl", {"q": "x", **kept}), tmp_path / "out", prompt_column="q", keep_columns=list(kept))
    assert records_of(tmp_path / "out", "train") == [{"task": "exact", **kept}]


MISSING = "DATA032.*a\\.jsonl, line 2 has no column"
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"a": 1}, rf"{MISSING} 'q' — got a\. Fix: name one with --prompt-column"),
    ({"q": "x"}, rf"{MISSING} 'a' — got q\. Fix: name one with --answer-column"),
    ({"q": 7, "a": 1}, r"DATA031.*line 2: column 'q' is of no use — got int.*--prompt-column"),
    ({"q": "x", "a": [1]}, r"DATA031.*line 2: column 'a' is of no use — got list, allowed text or a number"),
    ({"q": [{"role": "user", "content": "x"}], "a": 1}, r"DATA031.*line 2.*with --chat a list of messages"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_row_that_cant_be_used_is_refused_by_file_and_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    source = table(tmp_path / "a.jsonl", {"q": "good", "a": 1}, row)
    with pytest.raises(DataError, match=words):
        run(source, tmp_path / "out", prompt_column="q", answer_column="a")
    assert not (tmp_path / "out").exists()


def test_rows_without_prompt_or_answer_and_long_prompts_are_counted(tmp_path: Path) -> None:
    rows = [
        {"q": None, "a": 1},
        {"q": " ", "a": 1},
        {"q": "x", "a": None},
        {"q": "long " * 9, "a": 1},
        {"q": "y", "a": 1},
    ]
    manifest = run(
        table(tmp_path / "a.jsonl", *rows), tmp_path / "out", prompt_column="q", answer_column="a", seq_len=8
    )
    assert texts_of(tmp_path / "out", "train") == ["y"]
    assert omissions(manifest) == {
        "rows without a prompt": 2,
        "rows without an answer": 1,
        "prompts longer than 8 tokens, see --seq-len": 1,
    }
    assert manifest.origin is not None
    assert manifest.origin.documents == 2
    assert manifest.origin.notes == ("no validation samples: all prompts are the same",)


def test_source_without_a_prompt_that_fits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA033.*up to 2 tokens.*got 40 prompts: longer than 2 tokens"):
        run(questions(tmp_path / "a.jsonl"), tmp_path / "out", prompt_column="q", seq_len=2)


@pytest.mark.parametrize(("rows", "got"), [([], "an empty source"), ([{"q": " ", "a": "1"}], "1 ")])
def test_source_without_prompts_is_named_and_no_length_is_blamed(
    tmp_path: Path, rows: list[dict[str, str]], got: str
) -> None:
    source = table(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError, match=rf"DATA033.*no prompts in {re.escape(str(source))}.*got {got}") as caught:
        run(source, tmp_path / "out", prompt_column="q", answer_column="a")
    assert "seq-len" not in str(caught.value)


def test_plain_text_has_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("once upon a time")
    with pytest.raises(DataError, match=r"DATA032.*a\.txt has no column 'q' — got a plain text, allowed CSV"):
        run(tmp_path / "a.txt", tmp_path / "out", prompt_column="q")


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("a.jsonl", {"answer_column": "a"}, "--answer-column has no effect without --prompt-column"),
        ("a.jsonl", {"prompt_column": "q", "system": "be short"}, "--system has no effect without --chat"),
        ("a.jsonl", {"prompt_column": "q", "chat": True, "system": "be \udcff"}, "--system is out of range"),
        (
            "a.jsonl",
            {"prompt_column": "q", "answer_pattern": "x"},
            "--answer-pattern has no effect without --answer-col",
        ),
        ("problems:sort2", {"task": "math"}, "--task has no effect on generated prompts"),
        ("problems:sort2", {"prompt_column": "q"}, "--prompt-column has no effect on generated prompts"),
        ("stdlib", {"prompt_column": "q"}, "--prompt-column has no effect on --source stdlib"),
        ("a.jsonl", {"prompt_column": "q", "keep_columns": ["answer"]}, "--keep-columns is out of range — got answer"),
        (
            "a.jsonl",
            {"prompt_column": "q", "answer_column": "a", "answer_pattern": "("},
            "--answer-pattern is out of range",
        ),
    ],
)
def test_option_without_effect_is_refused(tmp_path: Path, source: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(source, tmp_path / "out", **options)


# ── chats ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def chatty(tmp_path: Path) -> Path:
    """A tokenizer of bytes with a chat template in which roles begin with a special token."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "chatty")
    return tmp_path / "chatty"


def test_chat_prompts_are_those_of_chats_with_the_same_columns(tmp_path: Path) -> None:
    """What a policy is asked is what it was fine-tuned on: the row's system message, its tools and its input."""
    tokenizer = byte_tokenizer()
    turns = "{% for m in messages %}<extra_id_0>{{ m.role }}:{{ m.content }}{% endfor %}"
    tokenizer.chat_template = "{% if tools %}{{ tools[0].name }};{% endif %}" + turns + OPENING
    tokenizer.save_pretrained(tmp_path / "chatty")
    rows = [
        {"instruction": f"add {n}", "input": f"to {n}", "output": f"{2 * n}", "system": f"be {n}", "tools": tools}
        for n, tools in enumerate(([{"name": "plus"}], '[{"name": "minus"}]', None))
    ]
    source = table(tmp_path / "a.jsonl", *rows)
    how: dict[str, Any] = {"tokenizer": str(tmp_path / "chatty"), "validation_fraction": 0.0, "chat": True}
    manifest = run(source, tmp_path / "out", prompt_column="instruction", answer_column="output", **how)
    assert sorted(texts_of(tmp_path / "out", "train")) == [
        "<extra_id_0>system:be 2<extra_id_0>user:add 2\n\nto 2<extra_id_0>assistant:",
        "minus;<extra_id_0>system:be 1<extra_id_0>user:add 1\n\nto 1<extra_id_0>assistant:",
        "plus;<extra_id_0>system:be 0<extra_id_0>user:add 0\n\nto 0<extra_id_0>assistant:",
    ]
    assert manifest.origin is not None and not manifest.origin.omissions

    run(source, tmp_path / "chats", **how)
    chats = texts_of(tmp_path / "chats", "train")
    for prompt in texts_of(tmp_path / "out", "train"):
        assert any(chat.startswith(prompt) for chat in chats)


def test_tools_that_a_template_of_prompts_ignores_are_counted(tmp_path: Path, chatty: Path) -> None:
    source = table(tmp_path / "a.jsonl", *({"q": f"{n}?", "tools": [{"name": "plus"}]} for n in range(3)))
    how: dict[str, Any] = {"prompt_column": "q", "tokenizer": str(chatty), "validation_fraction": 0.0, "chat": True}
    manifest = run(source, tmp_path / "out", **how)
    assert omissions(manifest) == {"lists of tools which the chat template ignores": 3}


@pytest.mark.parametrize("role", ["system", "developer"])
def test_prompt_with_a_system_message_of_its_own_gets_no_other(tmp_path: Path, chatty: Path, role: str) -> None:
    conversation = [{"role": role, "content": "own"}, {"role": "user", "content": "a"}]
    source = table(tmp_path / "a.jsonl", {"q": conversation})
    how: dict[str, Any] = {"prompt_column": "q", "tokenizer": str(chatty), "validation_fraction": 0.0, "chat": True}
    run(source, tmp_path / "out", system="short", **how)
    assert texts_of(tmp_path / "out", "train") == [f"<extra_id_0>{role}:own<extra_id_0>user:a<extra_id_1>"]


@pytest.mark.parametrize("form", ["objects", "JSON, as in CSV files"])
def test_chat_puts_prompts_into_the_template_up_to_the_answer(tmp_path: Path, chatty: Path, form: str) -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text, given = '[{"role": "admin", "content": "c"}]', conversation if form == "objects" else json.dumps(conversation)
    source = table(tmp_path / "a.jsonl", {"q": "one"}, {"q": text}, {"q": given})
    how: dict[str, Any] = {"prompt_column": "q", "tokenizer": str(chatty), "validation_fraction": 0.0, "chat": True}
    run(source, tmp_path / "out", system="short", **how)
    opening = "<extra_id_0>system:short<extra_id_0>"
    assert sorted(texts_of(tmp_path / "out", "train")) == [
        f"{opening}user:{text}<extra_id_1>",
        f"{opening}user:a<extra_id_0>assistant:b<extra_id_1>",
        f"{opening}user:one<extra_id_1>",
    ]
    for row in arrays_of(tmp_path / "out", "train")["input_ids"]:
        assert row.max() == row[-1] == 260, "the generation prompt is one special token"
    assert tokenizer_of(tmp_path / "out").chat_template == TEMPLATE


SHAREGPT = [{"from": "human", "value": "x"}]
PARTS = [{"role": "User", "content": [{"type": "text", "text": "x"}]}]


@pytest.mark.parametrize("prompt", [{"role": "user", "content": "x"}, SHAREGPT, json.dumps(SHAREGPT), PARTS])
def test_prompt_of_messages_has_the_forms_that_chats_have(tmp_path: Path, chatty: Path, prompt: Any) -> None:
    how = {"prompt_column": "q", "answer_column": "a", "tokenizer": str(chatty), "chat": True}
    run(table(tmp_path / "a.jsonl", {"q": prompt, "a": 1}), tmp_path / "out", validation_fraction=0.0, **how)
    assert texts_of(tmp_path / "out", "train") == ["<extra_id_0>user:x<extra_id_1>"]


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    for source, columns in ((questions(tmp_path / "a.jsonl"), {"prompt_column": "q"}), ("problems:sort2", {})):
        with pytest.raises(DataError, match=r"DATA034.*'byte' has no chat template"):
            run(source, tmp_path / "out", chat=True, **columns)


def test_template_that_refuses_a_message_says_why(tmp_path: Path, chatty: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    tokenizer.save_pretrained(chatty)
    with pytest.raises(DataError, match=r"DATA034.*got TemplateError: no system messages.*leave out --system"):
        run(questions(tmp_path / "a.jsonl"), tmp_path / "out", prompt_column="q", tokenizer=str(chatty), chat=True)


# ── splits ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    names=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    fraction=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    limit=st.integers(0, 20),
    seed=st.integers(0, 3),
)
def test_splits_have_no_prompt_in_common_and_lose_none_unsaid(
    names: list[int], fraction: float, limit: int, seed: int
) -> None:
    options, account = (
        PrepareOptions("x", Path(), validation_fraction=fraction, validation_samples=limit, seed=seed),
        Account(),
    )
    train, held = split([bytes([name]) for name in names], options, account, "prompts")
    trained, validated = Counter(names[row] for row in train), Counter(names[row] for row in held)
    different = len(set(names))
    assert not trained.keys() & validated.keys()
    assert len({*train.tolist(), *held.tolist()}) == len(train) + len(held)
    assert len(held) <= limit and trained
    left_out = sum(one.count for one in account.origin().omissions)
    assert len(train) + len(held) + left_out == len(names)
    held_out = different - len(trained)
    assert held_out <= max(1, math.ceil(fraction * different))
    assert (held_out > 0) == (different > 1 and fraction > 0 and limit > 0)
    if validated:
        rows = {name: min(names.count(name), max(validated.values())) for name in validated}
        assert all(rows[name] - count <= 1 for name, count in validated.items()), "each as often as the others"


def test_max_samples_cuts_training_alone_and_says_so(tmp_path: Path) -> None:
    manifest = run(questions(tmp_path / "a.jsonl"), tmp_path / "out", prompt_column="q", max_samples=7)
    assert (manifest.samples("train"), manifest.samples("validation")) == (7, 2)
    assert manifest.origin is not None
    assert manifest.origin.notes == ("the source isn't used up: --max-samples 7 is reached",)


# ── manifests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_manifest_of_prompts_needs_their_tensors(tmp_path: Path) -> None:
    run(questions(tmp_path / "a.jsonl"), tmp_path / "out", prompt_column="q")
    file = tmp_path / "out" / MANIFEST
    content = json.loads(file.read_text())
    content["tensors"] = [tensor for tensor in content["tensors"] if tensor["name"] != "reward_data"]
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"DATA003.*prompts without reward_data"):
        load(tmp_path / "out")


def test_bare_folder_of_prompts_is_known_as_such(tmp_path: Path) -> None:
    run(questions(tmp_path / "a.jsonl"), tmp_path / "out", prompt_column="q")
    (tmp_path / "out" / MANIFEST).unlink()
    assert load(tmp_path / "out").modality == "prompts"


def test_dataset_of_prompts_is_refused_where_a_loss_is_needed(tmp_path: Path) -> None:
    run(questions(tmp_path / "a.jsonl"), tmp_path / "out", prompt_column="q")
    with pytest.raises(DataError, match=r"DATA035.*'out' has prompts"):
        load(tmp_path / "out").refuse_prompts()


def test_preview_counts_and_shows_what_there_is(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", *({"q": text, "a": "é"} for text in ("a", "abc", "abc")))
    manifest = run(source, tmp_path / "out", prompt_column="q", answer_column="a", validation_fraction=0.0)
    found = preview(tmp_path / "out", manifest)
    assert (found.different, found.shortest, found.longest) == ({"train": 2}, 1, 3)
    assert found.mean == pytest.approx(7 / 3)
    assert found.prompt == texts_of(tmp_path / "out", "train")[0] and found.record["answer"] == "é"


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.none()), min_size=1))
def test_records_survive_as_bytes(records: list[dict[str, Any]]) -> None:
    rows = pack_records(records)
    assert unpack_records(rows) == records
    wider = np.pad(rows, ((0, 0), (0, 3)))
    assert wider.shape == (len(records), rows.shape[1] + 3) and unpack_records(wider) == records


# ── reasoning-gym ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_reasoning_gym_gives_prompts_that_its_own_scoring_accepts(tmp_path: Path) -> None:
    gym = pytest.importorskip("reasoning_gym")
    run("reasoning-gym:chain_sum", tmp_path / "out", max_documents=30, validation_fraction=0.0)
    for text, record in zip(texts_of(tmp_path / "out", "train"), records_of(tmp_path / "out", "train"), strict=True):
        assert record["task"] == "reasoning-gym:chain_sum" and record["question"] == text
        assert gym.get_score_answer_fn("chain_sum")(record["answer"], record) == 1
    with pytest.raises(DataError, match=r"DATA030.*no task 'chain_sums'.*did you mean 'chain_sum'"):
        run("reasoning-gym:chain_sums", tmp_path / "other")


GYM = """
class Task:
    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __iter__(self):
        print("a task may print")
        words = set(map(str, range(1000)))  # Its order follows the hashes of texts.
        for word, _ in zip(words, range(self.size)):
            grid = ((self.seed, 1), (2, 3))
            yield {"question": word, "answer": word, "metadata": {"output": grid, "colours": {1: "red"}, "rows": [[4]]}}

def create_dataset(name, size, seed):
    if name == "broken":
        raise ValueError("no such luck")
    return Task(size, seed)
"""


@pytest.fixture
def gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with the interface of reasoning-gym."""
    package = tmp_path / "packages" / "reasoning_gym"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(GYM, encoding="utf-8")
    (package / "factory.py").write_text("DATASETS = {'grids': None, 'broken': None}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "reasoning_gym"}
    yield
    for name in ("reasoning_gym.factory", "reasoning_gym"):
        sys.modules.pop(name, None)
    sys.modules.update(real)


@pytest.mark.slow
@pytest.mark.usefixtures("gym")
def test_reasoning_gym_grids_are_tuples_and_draws_the_same_in_every_process(tmp_path: Path) -> None:
    run("reasoning-gym:grids", tmp_path / "out", max_documents=9, validation_fraction=0.0, tokenizer="characters")
    words = "print(*list(set(map(str, range(1000))))[:9])"
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    order = subprocess.run([sys.executable, "-c", words], env=environment, capture_output=True, text=True, check=True)

    records = records_of(tmp_path / "out", "train")
    assert sorted(record["question"] for record in records) == sorted(order.stdout.split())
    for record in records:
        assert record["task"] == "reasoning-gym:grids"
        assert record["metadata"] == {"output": ((0, 1), (2, 3)), "colours": {1: "red"}, "rows": [[4]]}


@pytest.mark.slow
@pytest.mark.usefixtures("gym")
def test_reasoning_gym_that_fails_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"DATA030.*can't draw from its task 'broken'.*ValueError: no such luck"):
        run("reasoning-gym:broken", tmp_path / "out", max_documents=9)


@pytest.mark.slow
@pytest.mark.usefixtures("gym")
def test_reasoning_gym_seeds_are_further_apart_than_any_dataset_is_long() -> None:
    entries = [list(gym_entries("grids", seed, 1)) for seed in (0, 1, 2)]
    first, second, third = (entry["metadata"]["output"][0][0] for (entry,) in entries)
    assert first == 0
    assert min(abs(second - first), abs(third - first), abs(third - second)) > 1_000_000


def test_reasoning_gym_that_isnt_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"PREP008.*reasoning-gym.*pip install 'hypha_ray\[rl\]'"):
        run("reasoning-gym:chain_sum", tmp_path / "out")
