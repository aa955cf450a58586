"""Chats with calls of tools: whichever form their arguments have, the template gets the one that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from hypha_ray.data.encoders import byte_tokenizer
from hypha_ray.data.kinds.chat_templates import ChatTemplate, find_answers
from hypha_ray.data.sources.chats import Chat
from hypha_ray.errors import DataError
from tests.support.prepared import CHATML, omissions, table
from tests.unit.data.test_chats import parts_of, run, said, tokenizer_with

CALLS = (
    "{{% for t in tools or [] %}}{{{{ t | tojson }}}};{{% endfor %}}"
    "{{% for m in messages %}}<extra_id_0>{{{{ m.role }}}}\n"
    "{{% for call in m.tool_calls or [] %}}{{{{ call.function.name }}}}({arguments}){{% endfor %}}"
    "{{{{ m.content }}}}<extra_id_1>{{% endfor %}}{{% if add_generation_prompt %}}<extra_id_0>assistant\n{{% endif %}}"
)
OF_OBJECTS = CALLS.format(arguments="{{ call.function.arguments | tojson }}")
"""Writes arguments as JSON, as most templates do."""
OF_TEXTS = CALLS.format(arguments="{{ '' + call.function.arguments }}")
"""Puts arguments into a text, and fails if they aren't one, as DeepSeek's templates do."""
CITY = {"city": "Zürich", "days": 2}


def chat(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    asked, told = said("rain?", "no")
    return {"messages": [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, told]}


@pytest.mark.parametrize("template", [OF_OBJECTS, OF_TEXTS], ids=["objects", "texts"])
@pytest.mark.parametrize("arguments", [CITY, json.dumps(CITY)], ids=["object", "text"])
def test_arguments_are_rendered_once_in_the_form_that_the_template_takes(
    tmp_path: Path, template: str, arguments: Any
) -> None:
    source = table(tmp_path / "a.jsonl", chat(arguments))
    run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, template))
    call = 'weather({"city": "Zürich", "days": 2})<extra_id_1>'
    assert parts_of(tmp_path / "out")[0][1] == [call, "no<extra_id_1>"]


def test_calls_that_a_template_leaves_out_are_counted(tmp_path: Path) -> None:
    manifests = []
    for name, template in (("whole", OF_OBJECTS), ("none", CHATML)):
        source = table(tmp_path / "a.jsonl", chat(CITY), {"messages": said("Hi", "Hello")})
        manifests.append(run(source, tmp_path / name / "out", tokenizer=tokenizer_with(tmp_path / name, template)))
    assert [omissions(one) for one in manifests] == [{}, {"tool calls in chats whose template renders none": 1}]


def test_arguments_that_are_no_json_object_stay(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", chat("all of it"))
    run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, OF_TEXTS))
    assert parts_of(tmp_path / "out")[0][1][0] == "weather(all of it)<extra_id_1>"


def test_template_that_takes_neither_form_tells_of_the_first(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", chat(CITY))
    name = tokenizer_with(tmp_path, CALLS.format(arguments="{{ call.function.arguments.city.x.y }}"))
    with pytest.raises(DataError, match=r"DATA034.*line 1.*UndefinedError.*mend or remove the row"):
        run(source, tmp_path / "out", tokenizer=name)


def test_fields_that_parquet_adds_to_calls_and_tools_of_other_rows_are_left_out(tmp_path: Path) -> None:
    others = {"zone": "UTC"}
    rows = [chat(CITY) | {"tools": [{"name": "a", "x": 1}]}, chat(others) | {"tools": [{"name": "b", "y": [{}]}]}]
    rows[1]["tools"][0]["y"] = ["z"]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    name = tokenizer_with(tmp_path, OF_OBJECTS)
    for source in (tmp_path / "a.parquet", tmp_path / "saved", table(tmp_path / "a.jsonl", *rows)):
        run(source, tmp_path / f"out-{source.name}", tokenizer=name, validation_fraction=0.0)
    found = [parts_of(path) for path in sorted(tmp_path.glob("out-*"))]
    assert found[0] == found[1] == found[2]
    assert [runs[0] for _, runs in found[0]] == [
        'weather({"city": "Zürich", "days": 2})<extra_id_1>',
        'weather({"zone": "UTC"})<extra_id_1>',
    ]
    assert [text.partition(";")[0] for text, _ in found[0]] == ['{"name": "a", "x": 1}', '{"name": "b", "y": ["z"]}']


def harmony(messages: list[dict[str, Any]], opened: bool) -> str:
    """Chats as gpt-oss has them: the last answer ends otherwise than the others, by a token that has no role."""
    text = ""
    for message in messages:
        channel = "<|channel|>final" if message["role"] == "assistant" else ""
        end = "<|return|>" if message is messages[-1] and channel and not opened else "<|end|>"
        text += f"<|start|>{message['role']}{channel}<|message|>{message['content']}{end}"
    return text + "<|start|>assistant" * opened


def deepseek(messages: list[dict[str, Any]], opened: bool) -> str:
    """Chats as DeepSeek V3 has them: results of tools are followed by an answer without a prompt."""
    text, after_tool = "", False
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            text += f"<outputs>{content}"
        elif role == "user":
            text += f"<User>{content}"
        else:
            text += ("</outputs>" if after_tool else "<Assistant>") + content
            text += ("<calls>w</calls>" if "tool_calls" in message else "") + "<eos>"
        after_tool = role == "tool"
    return text + ("</outputs>" if after_tool else "<Assistant><think>\n" * opened)


def test_answers_that_end_in_a_token_without_a_role_are_found_with_it() -> None:
    messages, ends = [*said("Hi", "Hello"), *said("More", "Fine")], ("<|return|>",)
    text = harmony(messages, False)
    parts = find_answers(harmony, messages, [1, 3], ends, ("<|start|>", "<|channel|>", "<|end|>"))
    assert [text[start:stop] for start, stop in parts or []] == [
        "<|channel|>final<|message|>Hello<|end|>",
        "<|channel|>final<|message|>Fine<|return|>",
    ]


def test_answer_behind_the_results_of_a_tool_needs_no_prompt() -> None:
    asked, called = said("rain?", "I look.")
    called["tool_calls"] = [{"function": {"name": "w", "arguments": {}}}]
    messages = [asked, called, {"role": "tool", "content": "no"}, {"role": "assistant", "content": "No."}]
    text = deepseek(messages, False)
    parts = find_answers(deepseek, messages, [1, 3], ("<eos>",))
    assert [text[start:stop] for start, stop in parts or []] == ["I look.<calls>w</calls><eos>", "No.<eos>"]


# ── forms of messages beside ──────────────────────────────────────────────────────────────────────────────────────


def test_tokenizer_that_does_not_tell_its_added_tokens_renders_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of mistral-common raise this error."""

    def untold(_: Any) -> Any:
        raise NotImplementedError

    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", property(untold))
    rendered = ChatTemplate(tokenizer, "a").rendered(Chat("a, line 1", said("Hi", "Hello")))
    assert [rendered.text[start:end] for start, end in rendered.parts] == ["Hello<extra_id_1>"]


def test_content_in_parts_of_text_is_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked, _ = said("Hi", "")
    source = table(tmp_path / "a.jsonl", {"messages": [asked, {"role": "assistant", "content": parts}]})
    run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, OF_OBJECTS))
    assert parts_of(tmp_path / "out")[0][1] == ["Hello<extra_id_1>"]


def test_list_of_messages_that_is_empty_as_json_is_left_out(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": "[]"}, {"messages": said("Hi", "Hello")})
    manifest = run(source, tmp_path / "out", tokenizer=tokenizer_with(tmp_path, OF_OBJECTS))
    assert omissions(manifest) == {"chats without a message of the assistant": 1}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": ["user"], "content": "x"}, r"line 4.*role \['user'\]"),
        ({"role": "user", "content": [{"type": "image", "text": "x"}]}, "line 4.*parts of type image, allowed text"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, r"line 4.*weight 0\.5, allowed 0 or 1"),
        ({"role": "assistant", "content": "x", "weight": "0"}, r"line 4.*weight '0', allowed 0 or 1"),
    ],
)
def test_message_that_cant_be_used_is_refused_by_the_line_of_the_file(
    tmp_path: Path, message: dict[str, Any], words: str
) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n \n" + json.dumps({"messages": [message]}))
    with pytest.raises(DataError, match=f"DATA031.*{words}"):
        run(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer_with(tmp_path, OF_OBJECTS))
