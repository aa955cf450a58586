"""Datasets of chats: the assistant's tokens are scored, all of them and no others, whatever form the source has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.report import lengths_of, marked, sample_of
from hypha_ray.errors import ConfigError, DataError
from hypha_ray.model.configuration import resolve_task
from hypha_ray.model.losses import compute_losses
from hypha_ray.model.tasks import find_task
from tests.support.prepared import CHATML, arrays_of, omissions, prepared, table

"""The form of ChatML, with one token for each mark."""
MARKED = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<extra_id_1>{% endgeneration %}{% else %}{{ m.content }}<extra_id_1>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<extra_id_0>assistant\n{% endif %}"
)
"""The same, with marks around the assistant's parts."""
FORGETFUL = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}\n{% if loop.last %}thinking {% endif %}"
    "{{ m.content | trim }}<extra_id_1>\n{% endfor %}{% if add_generation_prompt %}<extra_id_0>assistant\n{% endif %}"
)
"""Renders the last message in another way than the earlier ones, as templates of reasoning models do."""
OPENED = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}\n{% set text = m.content.split('</think>')[-1].strip() %}"
    "{% if m.role == 'assistant' and loop.last %}<think>"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[0].split('<think>')[-1] }}{% endif %}</think>"
    "{% endif %}{{ text }}<extra_id_1>\n{% endfor %}"
    "{% if add_generation_prompt %}<extra_id_0>assistant\n<think>{% endif %}"
)
"""Renders thoughts in the last answer only, and opens them in the generation prompt."""
ENDED = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}\n{{ m.content | trim }}"
    "{% if m.role == 'assistant' and loop.last %}<extra_id_2>{% else %}<extra_id_1>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<extra_id_0>assistant\n{% endif %}"
)
"""Ends the last answer with another token than earlier ones."""
CLOSED = (
    "{% for m in messages %}<extra_id_0>{{ m.role }}\n{{ m.content | trim }}<extra_id_1>\n{% endfor %}"
    "{% if add_generation_prompt %}<extra_id_0>assistant\n{% else %}</s>{% endif %}"
)
"""Ends each chat with a token of its own, unless an answer is to come."""


def run(source: Path | str, out: Path, **options: Any) -> Manifest:
    return prepared(source, out, **{"chat": True, **options})


def said(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, Any]]:
    return [{"role": roles[place % len(roles)], "content": content} for place, content in enumerate(contents)]


def parts_of(out: Path, name: str = "train") -> list[tuple[str, list[str]]]:
    """Text of each sample, and the texts of its runs of scored tokens, sorted."""
    arrays, tokenizer = arrays_of(out, name), AutoTokenizer.from_pretrained(out / "tokenizer")
    found = []
    for ids, mask, labels in zip(*(arrays[key] for key in ("input_ids", "attention_mask", "labels")), strict=True):
        assert ((labels == -100) | (labels == ids)).all() and (labels[mask == 0] == -100).all()
        edges = np.flatnonzero(np.diff(np.concatenate([[False], labels != -100, [False]]).astype(int)))
        runs = [tokenizer.decode(ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]
        found.append((tokenizer.decode(ids[mask == 1].tolist()), runs))
    return sorted(found)


@pytest.fixture(params=[CHATML, MARKED], ids=["prefixes", "marks"])
def chatty(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return tokenizer_with(tmp_path, request.param)


def tokenizer_with(tmp_path: Path, template: str) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "chatty")
    return str(tmp_path / "chatty")


# ── scored tokens ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_answers_of_several_turns_are_scored_with_their_ends_and_nothing_else(tmp_path: Path, chatty: str) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello", "More", "Yes é")})
    manifest = run(source, tmp_path / "out", tokenizer=chatty)
    assert parts_of(tmp_path / "out") == [
        (
            "<extra_id_0>user\nHi<extra_id_1>\n<extra_id_0>assistant\nHello<extra_id_1>\n"
            "<extra_id_0>user\nMore<extra_id_1>\n<extra_id_0>assistant\nYes é<extra_id_1>\n",
            ["Hello<extra_id_1>", "Yes é<extra_id_1>"],
        )
    ]
    assert lengths_of(tmp_path / "out", manifest).scored == len("Hello") + 1 + len("Yes é".encode()) + 1
    assert manifest.modality == "language"


TURNS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(TURNS, min_size=2, max_size=6), min_size=2, max_size=5))
def test_both_ways_of_finding_answers_agree_with_each_other_and_with_the_contents(
    tmp_path_factory: pytest.TempPathFactory, chats: list[list[str]]
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    source = table(folder / "a.jsonl", *({"messages": said(*chat)} for chat in chats))
    found = []
    for name, template in (("prefixes", CHATML), ("marks", MARKED)):
        (folder / name).mkdir()
        tokenizer = tokenizer_with(folder / name, template)
        run(source, folder / name / "out", tokenizer=tokenizer, validation_fraction=0.0)
        found.append(arrays_of(folder / name / "out"))
    assert all((found[0][key] == found[1][key]).all() for key in ("input_ids", "attention_mask", "labels"))
    wanted = sum(len(text.encode()) + 1 for chat in chats for text in chat[1::2])
    assert (found[0]["labels"] != -100).sum() == wanted


def test_marks_give_the_mask_of_transformers(tmp_path: Path) -> None:
    name = tokenizer_with(tmp_path, MARKED)
    messages = said("a", "bc", "d", "ef")
    run(table(tmp_path / "a.jsonl", {"messages": messages}), tmp_path / "out", tokenizer=name)
    wanted = AutoTokenizer.from_pretrained(name).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    arrays = arrays_of(tmp_path / "out")
    assert arrays["input_ids"][0].tolist() == wanted["input_ids"]
    assert (arrays["labels"][0] != -100).tolist() == [bool(one) for one in wanted["assistant_masks"]]


def test_loss_on_a_batch_of_chats_is_that_of_transformers(tmp_path: Path, chatty: str) -> None:
    rows = ({"messages": said("Hi", "Hello " * n, "More", "Yes")} for n in range(1, 5))
    run(table(tmp_path / "a.jsonl", *rows), tmp_path / "out", tokenizer=chatty, validation_fraction=0.0)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=384, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config).eval()
    batch = {name: torch.from_numpy(array) for name, array in arrays_of(tmp_path / "out").items()}
    task = resolve_task(find_task("causal-lm"), model, None, explicit=False)
    inputs = task.inputs(batch)
    with torch.no_grad():
        ours = compute_losses(task, model, inputs).reported
        theirs = model(**{name: tensor.long() for name, tensor in batch.items()}).loss
    assert float(ours) == pytest.approx(float(theirs), abs=1e-6)
    assert task.count(inputs) == sum(len("Hello " * n) + 1 + len("Yes") + 1 for n in range(1, 5))


@pytest.mark.parametrize(("flag", "no", "yes"), [("weight", 0, 1), ("train", False, True)])
def test_message_with_weight_zero_is_not_scored(tmp_path: Path, chatty: str, flag: str, no: Any, yes: Any) -> None:
    messages = said("a", "first", "b", "second")
    rows = {"messages": [messages[0], {**messages[1], flag: no}, messages[2], {**messages[3], flag: yes}]}
    run(table(tmp_path / "a.jsonl", rows), tmp_path / "out", tokenizer=chatty)
    assert parts_of(tmp_path / "out")[0][1] == ["second<extra_id_1>"]


def test_answers_in_a_prompt_are_no_part_of_its_completion(tmp_path: Path, chatty: str) -> None:
    row = {"prompt": said("a", "first", "b"), "completion": said("second", roles=("assistant",))}
    run(table(tmp_path / "a.jsonl", row), tmp_path / "out", tokenizer=chatty)
    ((text, scored),) = parts_of(tmp_path / "out")
    assert "first" in text and scored == ["second<extra_id_1>"]


def test_answer_that_could_share_a_token_with_its_prompt_begins_a_token_of_its_own(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = {piece: number for number, piece in enumerate(["</s>", "=", "4", "=4", "2"])}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[("=", "4")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False, use_regex=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path / "merging")
    how = {"prompt_column": "p", "completion_column": "c", "chat": False}
    run(
        table(tmp_path / "a.jsonl", {"p": "2=", "c": "4"}), tmp_path / "out", tokenizer=str(tmp_path / "merging"), **how
    )
    arrays = arrays_of(tmp_path / "out")
    assert arrays["input_ids"].tolist() == [[4, 1, 2, 0]]
    assert arrays["labels"].tolist() == [[-100, -100, 2, 0]]


# ── forms of sources ──────────────────────────────────────────────────────────────────────────────────────────────

ANSWERED = [{"role": "assistant", "content": "Hello"}]
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": said("Hi", "Hello")},
    "messages as JSON": {"messages": json.dumps(said("Hi", "Hello")), "tools": "null"},
    "ShareGPT": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "other roles": {"conversations": [{"from": "User", "value": "Hi"}, {"from": "bot", "value": "Hello"}]},
    "prompt and completion": {"prompt": "Hi", "completion": "Hello"},
    "completion with the prompt": {"prompt": "Hi", "completion": said("Hi ", "Hello")},
    "completion with the messages of the prompt": {"prompt": said("Hi"), "completion": said("Hi", "Hello")},
    "completion of one message": {"prompt": said("Hi"), "completion": ANSWERED[0]},
    "lists of messages": {"prompt": said("Hi"), "completion": ANSWERED},
    "lists of messages as JSON": {"prompt": json.dumps(said("Hi")), "completion": json.dumps(ANSWERED)},
    "Alpaca": {"instruction": "Hi", "input": "", "output": "Hello"},
    "Alpaca without input": {"instruction": "Hi", "output": "Hello"},
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_forms_of_a_chat_are_recognised(tmp_path: Path, row: dict[str, Any]) -> None:
    manifest = run(table(tmp_path / "a.jsonl", row), tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    wanted = "<extra_id_0>user\nHi<extra_id_1>\n<extra_id_0>assistant\nHello<extra_id_1>\n"
    assert parts_of(tmp_path / "out") == [(wanted, ["Hello<extra_id_1>"])]
    assert omissions(manifest) == {}


@pytest.mark.parametrize("given", ['[{"x": 1}, 2]', '[{"from": "Ann", "value": "Hi"}]', '[{"role": ["user"]}]', "[]"])
def test_prompt_that_is_a_list_of_no_messages_is_a_text(tmp_path: Path, given: str) -> None:
    row = {"prompt": given, "completion": "[]"}
    run(table(tmp_path / "a.jsonl", row), tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    wanted = f"<extra_id_0>user\n{given}<extra_id_1>\n<extra_id_0>assistant\n[]<extra_id_1>\n"
    assert parts_of(tmp_path / "out") == [(wanted, ["[]<extra_id_1>"])]


def test_input_of_alpaca_follows_the_instruction(tmp_path: Path) -> None:
    row = {"instruction": "Add", "input": "1, 2", "output": "3"}
    run(table(tmp_path / "a.jsonl", row), tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    assert "user\nAdd\n\n1, 2<extra_id_1>" in parts_of(tmp_path / "out")[0][0]
    how = {"chat": False, "prompt_column": "instruction", "completion_column": "output"}
    run(tmp_path / "a.jsonl", tmp_path / "plain", tokenizer="byte", **how)
    assert parts_of(tmp_path / "plain") == [("Add\n\n1, 2" + "3</s>", ["3</s>"])]


def test_system_message_before_a_repeated_prompt_is_a_part_of_it(tmp_path: Path) -> None:
    whole = [{"role": "system", "content": "Be brief"}, *said("Hi", "Hello")]
    source = table(tmp_path / "a.jsonl", {"prompt": "Hi", "completion": whole})
    run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    turns = "<extra_id_0>user\nHi<extra_id_1>\n<extra_id_0>assistant\nHello<extra_id_1>\n"
    assert parts_of(tmp_path / "out") == [(f"<extra_id_0>system\nBe brief<extra_id_1>\n{turns}", ["Hello<extra_id_1>"])]


def test_calls_and_their_results_in_roles_of_their_own_are_those_of_messages(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function if m.tool_calls }}")
    call = {"name": "f", "arguments": {"a": 1}}
    roles = (("human", "Hi"), ("function_call", json.dumps(call)), ("observation", "7"), ("gpt", "Hello"))
    turns = [{"from": role, "value": text} for role, text in roles]
    source = table(tmp_path / "a.jsonl", {"conversations": turns})
    run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, template))
    ((text, parts),) = parts_of(tmp_path / "out")
    assert parts == [f"{call}<extra_id_1>", "Hello<extra_id_1>"]
    assert "<extra_id_0>tool\n7<extra_id_1>" in text


@pytest.mark.parametrize("suffix", ["csv", "parquet", "saved", "json"])
def test_chats_of_every_kind_of_table(tmp_path: Path, suffix: str) -> None:
    content: Any = json.dumps(said("Hi", "Hello")) if suffix == "csv" else said("Hi", "Hello")
    rows = datasets.Dataset.from_list([{"id": 1, "messages": content}, {"id": 2, "messages": content}])
    source = tmp_path / f"rows.{suffix}"
    {"csv": rows.to_csv, "parquet": rows.to_parquet, "saved": rows.save_to_disk, "json": rows.to_json}[suffix](
        str(source)
    )
    manifest = run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    assert [runs for _, runs in parts_of(tmp_path / "out")] == [["Hello<extra_id_1>"]] * 2
    assert omissions(manifest) == {"columns not used; only those of the chats are": 1}


def test_named_columns_come_before_recognised_ones(tmp_path: Path) -> None:
    row = {"messages": said("no", "no"), "talk": said("Hi", "Hello"), "q": "Q", "a": "A"}
    tokenizer = tokenizer_with(tmp_path, CHATML)
    source = table(tmp_path / "a.jsonl", row)
    for name, columns, answer in (
        ("talk", {"messages_column": "talk", "chat": False}, "Hello"),
        ("qa", {"prompt_column": "q", "completion_column": "a"}, "A"),
    ):
        run(source, tmp_path / name, tokenizer=tokenizer, **columns)
        assert parts_of(tmp_path / name)[0][1] == [f"{answer}<extra_id_1>"]


def test_prompt_and_completion_without_a_template_are_joined_and_ended(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"q": "2+2=", "a": "4</s>"})
    run(source, tmp_path / "out", chat=False, prompt_column="q", completion_column="a")
    arrays = arrays_of(tmp_path / "out")
    assert arrays["input_ids"].tolist() == [[byte + 3 for byte in b"2+2=4</s>"] + [1]]
    assert arrays["labels"].tolist() == [[-100] * 4 + [byte + 3 for byte in b"4</s>"] + [1]]


def test_system_message_is_the_rows_or_that_of_the_options(tmp_path: Path) -> None:
    rows = [
        {"messages": said("a", "1")},
        {"messages": said("b", "1"), "system": "row"},
        {"messages": [{"role": "system", "content": "own"}, *said("c", "1")], "system": "row"},
    ]
    tokenizer = tokenizer_with(tmp_path, CHATML)
    run(
        table(tmp_path / "a.jsonl", *rows), tmp_path / "out", tokenizer=tokenizer, system="all", validation_fraction=0.0
    )
    texts = [text.split("<extra_id_1>")[:2] for text, _ in parts_of(tmp_path / "out")]
    assert texts == [
        [f"<extra_id_0>system\n{system}", f"\n<extra_id_0>user\n{user}"]
        for system, user in (("all", "a"), ("own", "c"), ("row", "b"))
    ]


def test_tools_and_calls_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}{{ t.name }};{% endfor %}{% for m in messages %}<extra_id_0>{{ m.role }}\n"
        "{% for call in m.tool_calls or [] %}{{ call.name }}(){% endfor %}{{ m.content }}<extra_id_1>{% endfor %}"
        "{% if add_generation_prompt %}<extra_id_0>assistant\n{% endif %}"
    )
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "clock"}]},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It's noon."},
    ]
    source = table(tmp_path / "a.jsonl", {"messages": messages, "tools": [{"name": "clock"}]})
    run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, template))
    text, runs = parts_of(tmp_path / "out")[0]
    assert text.startswith("clock;<extra_id_0>user") and runs == ["clock()<extra_id_1>", "It's noon.<extra_id_1>"]


# ── what is left out, and what is refused ─────────────────────────────────────────────────────────────────────────


def test_chats_without_answers_and_tokens_cut_off_are_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": said("only a question")},
        {"messages": []},
        {"messages": said("Hi", "Hello " * 10)},
        {"messages": said("a question that is too long", "x")},
        {"messages": [said("Hi")[0], {**ANSWERED[0], "weight": 0}]},
    ]
    manifest = run(
        table(tmp_path / "a.jsonl", *rows), tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML), seq_len=32
    )
    whole = len("0user\nHi1\n0assistant\n" + "Hello " * 10 + "1\n")
    assert omissions(manifest) == {
        "rows without text in messages": 1,
        "chats without a message of the assistant": 1,
        "chats in which all messages of the assistant have the weight 0": 1,
        "chats without an answer in the first 32 tokens, see --seq-len": 1,
        "tokens behind the first 32 of a chat, see --seq-len": whole - 32,
    }
    assert manifest.origin is not None and manifest.origin.documents == 4
    assert "1 chat cut off at --seq-len 32" in manifest.origin.notes
    assert manifest.shapes == {"input_ids": (32,), "attention_mask": (32,), "labels": (32,)}


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (FORGETFUL, ["Hello<extra_id_1>", "thinking Yes<extra_id_1>"]),
        (OPENED, ["Hello<extra_id_1>", "</think>Yes<extra_id_1>"]),
        (ENDED, ["Hello<extra_id_1>", "Yes<extra_id_2>"]),
        (CLOSED, ["Hello<extra_id_1>", "Yes<extra_id_1>"]),
    ],
    ids=["last turn thinks", "prompt opens thoughts", "last turn ends otherwise", "chat has an end of its own"],
)
def test_answers_are_found_where_a_template_renders_beginnings_differently(
    tmp_path: Path, template: str, answers: list[str]
) -> None:
    rows = [{"messages": said("Hi", "Hello", "More", " Yes\n")}, {"messages": said("Hello", "Hello", "Yes", "Yes")}]
    source, name = table(tmp_path / "a.jsonl", *rows), tokenizer_with(tmp_path, template)
    run(source, tmp_path / "out", tokenizer=name, validation_fraction=0.0)
    assert [parts for _, parts in parts_of(tmp_path / "out")] == [answers, answers]


def test_thoughts_are_scored_where_the_template_renders_them_and_counted_where_not(tmp_path: Path) -> None:
    thought = "<think>one</think>", "<think>two</think>"
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", f"{thought[0]}Hello", "More", f"{thought[1]}Yes")})
    manifest = run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, OPENED))
    assert parts_of(tmp_path / "out")[0][1] == ["Hello<extra_id_1>", "two</think>Yes<extra_id_1>"]
    assert omissions(manifest)["thoughts in answers of which the chat template renders only the rest"] == 1


def test_calls_without_a_text_are_found_where_the_last_turn_is_rendered_differently(tmp_path: Path) -> None:
    calls = "{% if m.tool_calls %}{% if m.content %}\n{% endif %}<call>{% endif %}"
    name = tokenizer_with(tmp_path, FORGETFUL.replace("| trim }}", "| trim }}" + calls))
    messages = said("Hi", "", "More", "Yes")
    messages[1] |= {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    run(table(tmp_path / "a.jsonl", {"messages": messages}), tmp_path / "out", tokenizer=name)
    assert parts_of(tmp_path / "out")[0][1] == ["<call><extra_id_1>", "thinking Yes<extra_id_1>"]


def test_template_that_renders_answers_differently_is_refused_by_name(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello", "More", "Yes")})
    name = tokenizer_with(tmp_path, FORGETFUL.replace("trim", "upper"))
    with pytest.raises(DataError, match=r"DATA036.*a\.jsonl, line 1.*chatty.*message 2.*generation.*--chat-template"):
        run(source, tmp_path / "out", tokenizer=name)
    assert not (tmp_path / "out").exists()


def test_template_of_a_file_replaces_the_tokenizers_and_is_kept(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello", "More", "Yes")})
    (tmp_path / "marked.jinja").write_text(MARKED)
    how = {"tokenizer": tokenizer_with(tmp_path, FORGETFUL), "chat_template": tmp_path / "marked.jinja"}
    run(source, tmp_path / "out", **how)
    assert parts_of(tmp_path / "out")[0][1] == ["Hello<extra_id_1>", "Yes<extra_id_1>"]
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer").chat_template == MARKED


def test_characters_of_chats_and_template_make_a_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    source = table(tmp_path / "a.jsonl", {"messages": said("¿qué?", "así")})
    run(source, tmp_path / "out", tokenizer="characters", chat_template=tmp_path / "a.jinja")
    assert parts_of(tmp_path / "out") == [("user:¿qué?</s>assistant:así</s>", ["así</s>"])]


MISSING = "DATA032.*a\\.jsonl, line 2 has no column"
BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"text": "x"}, rf"{MISSING} 'messages' — got text\. Fix: name one with --messages-column"),
    ({"messages": "no JSON"}, r"DATA031.*line 2: column 'messages' has no chat — got str, allowed a list of messages"),
    ({"messages": said("a", "b", roles=("user", "oracle"))}, r"DATA031.*line 2.*role 'oracle', allowed human, gpt"),
    ({"messages": [{"role": "user", "content": 7}]}, r"DATA031.*line 2.*content of type int, allowed text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        r"line 2.*parts of type image, allowed text; im",
    ),
    (
        {"messages": [{"role": "function_call", "content": "f(1)"}]},
        r"line 2.*function_call with 'f\(1\)', allowed JSON",
    ),
    ({"messages": said("a", "b"), "tools": "x"}, r"DATA031.*line 2.*'tools'.*got str, allowed a list of JSON schemas"),
]


@pytest.mark.parametrize(("row", "words"), BAD_ROWS)
def test_row_that_is_no_chat_is_refused_by_file_and_line(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello")}, row)
    with pytest.raises(DataError, match=words):
        run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    assert not (tmp_path / "out").exists()


def test_table_without_chats_names_the_columns_of_chats(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"question": "x", "answer": "y"})
    flags = "--prompt-column question --completion-column answer"
    words = f"DATA032.*line 1 has no chat — got answer, question, allowed messages; conv.*{flags}"
    with pytest.raises(DataError, match=words):
        run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))
    with pytest.raises(DataError, match=f"DATA032.*no column 'text'.*{flags}"):
        run(source, tmp_path / "out", chat=False)
    source = table(tmp_path / "b.jsonl", {"prompt": "a", "chosen": "x", "rejected": "y"})
    with pytest.raises(DataError, match=r"DATA032.*has no chat.*--kind preferences"):
        run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, CHATML))


@pytest.mark.parametrize(("prompt", "noted"), [("", 0), ("<think>\n\n</think>\n\n", 2), ("<think>\n", 1)])
def test_answers_behind_another_text_than_the_generation_prompt_are_noted(
    tmp_path: Path, prompt: str, noted: int
) -> None:
    template = CHATML.replace("assistant\n", f"assistant\n{prompt}")
    source = table(
        tmp_path / "a.jsonl",
        {"messages": said("Hi", "Hello")},
        {"messages": said("Hi", "<think>\nWell\n</think>\nYes")},
    )
    manifest = run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, template))
    assert manifest.origin is not None
    notes = [note for note in manifest.origin.notes if "another text than the generation prompt" in note]
    assert [int(note.split()[0]) for note in notes] == ([noted] if noted else [])


def test_template_without_an_end_is_noted(tmp_path: Path, chatty: str) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello")})
    endless = tokenizer_with(tmp_path / "endless", CHATML.replace("<extra_id_1>", ""))
    for name, length, noted in ((endless, 64, 1), (chatty, 64, 0), (chatty, 24, 0)):
        manifest = run(source, tmp_path / f"out{length}-{noted}", tokenizer=name, seq_len=length)
        assert manifest.origin is not None
        assert sum("no answer ends in a special token" in note for note in manifest.origin.notes) == noted


def test_chats_without_the_flag_are_told_of_it(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello")})
    with pytest.raises(
        DataError, match=r"DATA032.*no column 'text' — got messages\. Fix: train on chats with --chat, or"
    ):
        run(source, tmp_path / "out", chat=False)


def test_template_that_refuses_a_chat_names_the_row(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello")})
    name = tokenizer_with(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"DATA034.*a\.jsonl, line 1.*roles must alternate"):
        run(source, tmp_path / "out", tokenizer=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "stdlib"}, "--chat has no effect on --source stdlib"),
        ({"chat": False, "system": "x"}, "--system has no effect without --chat"),
        ({"chat": False, "chat_template": Path("x")}, "--chat-template has no effect without --chat"),
        ({"completion_column": "a"}, "--completion-column has no effect without --prompt-column"),
        ({"messages_column": "m", "prompt_column": "a"}, "--prompt-column and --messages-column exclude each other"),
        ({"prompt_column": "q", "completion_column": "a", "task": "math"}, "--task has no effect on chats"),
        ({"chat_template": Path("missing.jinja")}, "PREP009.*missing.jinja can't be read"),
    ],
)
def test_option_of_chats_that_cant_be_used_is_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": said("Hi", "Hello")})
    with pytest.raises(ConfigError, match=words):
        run(**{"source": source, "out": tmp_path / "out", **options})


def test_plain_pairs_take_no_lists_of_messages(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"q": said("Hi"), "a": "Hello"})
    with pytest.raises(DataError, match=r"DATA031.*line 1: column 'q'.*got list, allowed text, or with --chat"):
        run(source, tmp_path / "out", chat=False, prompt_column="q", completion_column="a")


# ── splits and report ─────────────────────────────────────────────────────────────────────────────────────────────


def test_equal_chats_are_in_one_split_and_same_options_give_the_same_bytes(tmp_path: Path, chatty: str) -> None:
    rows = [{"messages": said(f"number {n % 20}", "ok")} for n in range(60)]
    source = table(tmp_path / "a.jsonl", *rows)
    for name in ("a/d", "b/d"):
        run(source, tmp_path / name, tokenizer=chatty, validation_fraction=0.1, samples_per_slice=8)
    assert len({text for text, _ in parts_of(tmp_path / "a/d")}) == 18
    assert not {text for text, _ in parts_of(tmp_path / "a/d")} & {
        text for text, _ in parts_of(tmp_path / "a/d", "validation")
    }
    first, again = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir() if p.is_file()} for n in ("a/d", "b/d"))
    assert first == again and len(first) == 1 + 7 + 1


def test_report_counts_tokens_and_marks_a_sample(tmp_path: Path, chatty: str) -> None:
    rows = [{"messages": said("Hi", "x" * n)} for n in (1, 9)]
    out = tmp_path / "out"
    manifest = run(table(tmp_path / "a.jsonl", *rows), out, tokenizer=chatty, validation_fraction=0.0)
    found, frame = lengths_of(out, manifest), len("0user\nHi1\n0assistant\n1\n")
    assert (found.tokens, found.scored, found.shortest, found.longest) == (2 * frame + 10, 12, frame + 1, frame + 9)
    assert [int(bar.split()[3]) for bar in found.bars()] == [1, 0, 0, 0, 0, 0, 0, 1]
    text = marked(sample_of(out, manifest), coloured=False).plain
    assert text.startswith("<extra_id_0>user\nHi<extra_id_1>\n<extra_id_0>assistant\n«x")
    assert text.endswith("x<extra_id_1>»\n")
    styles = {span.style for span in marked(sample_of(out, manifest), coloured=True).spans}
    assert styles == {"green", "dim"}
