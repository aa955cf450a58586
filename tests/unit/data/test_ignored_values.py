"""Values of messages that a chat template ignores are counted and named, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hypha_ray.data.manifest import Manifest
from tests.support.prepared import omissions, prepared, table
from tests.support.small_tokenizers import CHATML, chatml

IGNORED = "in messages, which the chat template ignores"


def run(tmp_path: Path, rows: list[dict[str, Any]], template: str = CHATML, **options: Any) -> Manifest:
    tokenizer = chatml()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = table(tmp_path / "rows.jsonl", *rows)
    return prepared(source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"), chat=True, **options)


def chat(place: int, role: str = "assistant", **more: Any) -> dict[str, Any]:
    """Two turns, of which the second has more keys in the message of a role."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"say {place} {n}"} for n in range(4)]
    turns[2 if role == "user" else 3] |= more
    return {"messages": turns}


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "mood"])
def test_thoughts_in_a_key_that_the_template_ignores_are_counted_by_its_name(tmp_path: Path, key: str) -> None:
    found = omissions(run(tmp_path, [chat(n, **{key: "4"}) for n in range(5)]))
    assert found == {f"values of {key!r} {IGNORED}": 5}


@pytest.mark.parametrize("value", ["thought", "say", ["a"], {"a": 1}, 7, True])
def test_values_that_the_template_renders_arent_counted(tmp_path: Path, value: Any) -> None:
    template = CHATML.replace("{{ m['content'] }}", "{{ m.get('reasoning', '') }}{{ m['content'] }}")
    assert omissions(run(tmp_path, [chat(n, reasoning=value) for n in range(5)], template)) == {}


def test_value_that_only_decides_on_the_text_is_rendered(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m['content'] }}", "{{ 'Q' if m.get('flag') }}{{ m['content'] }}")
    assert omissions(run(tmp_path, [chat(n, flag=True) for n in range(5)], template)) == {}


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_empty_values_arent_counted(tmp_path: Path, value: Any) -> None:
    assert omissions(run(tmp_path, [chat(n, reasoning=value) for n in range(5)])) == {}


def test_thoughts_of_earlier_answers_that_a_template_renders_in_the_last_only_are_counted(tmp_path: Path) -> None:
    thought = "{{ m.get('reasoning', '') if loop.last }}{{ m['content'] }}"
    rows = [chat(n, reasoning="red") for n in range(5)]
    for row in rows:
        row["messages"][1]["reasoning"] = "blue"
    found = omissions(run(tmp_path, rows, CHATML.replace("{{ m['content'] }}", thought)))
    assert found == {f"values of 'reasoning' {IGNORED}": 5}


def test_names_of_users_are_counted_and_weights_arent(tmp_path: Path) -> None:
    rows = [chat(n, "user", name="Ann", weight=1) for n in range(5)]
    assert omissions(run(tmp_path, rows)) == {f"values of 'name' {IGNORED}": 5}


def test_roles_and_tools_that_the_template_ignores_are_counted(tmp_path: Path) -> None:
    template = CHATML.replace("in messages %}", "in messages if m['role'] != 'system' %}", 1)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rows = [chat(n) | {"tools": tools, "system": "Be brief."} for n in range(5)]
    assert omissions(run(tmp_path, rows, template)) == {
        "messages of role 'system', whose content the chat template ignores": 5,
        "lists of tools which the chat template ignores": 5,
    }


def test_results_of_tools_whose_key_the_template_needs_arent_counted(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m['content'] }}", "{{ m['name'] ~ ':' if m['role'] == 'tool' }}{{ m['content'] }}")
    rows = [chat(n) for n in range(5)]
    for row in rows:
        row["messages"].insert(1, {"role": "tool", "content": "3", "name": "f", "tool_call_id": "x"})
    assert omissions(run(tmp_path, rows, template)) == {f"values of 'tool_call_id' {IGNORED}": 5}


def test_prompts_that_are_lists_of_messages_have_their_ignored_values_counted(tmp_path: Path) -> None:
    rows = [{"q": chat(n, "user", name="Ann")["messages"][:3]} for n in range(5)]
    assert omissions(run(tmp_path, rows, prompt_column="q")) == {f"values of 'name' {IGNORED}": 5}


def test_prompts_keep_the_values_that_their_template_renders(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m['content'] }}", "{{ m.get('name', '') }}{{ m['content'] }}")
    rows = [{"q": chat(n, "user", name="Ann")["messages"][:3]} for n in range(5)]
    assert omissions(run(tmp_path, rows, template, prompt_column="q")) == {}
