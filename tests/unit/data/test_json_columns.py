"""Chats, prompts and tools in columns of JSON: ``Json`` features, JSON texts, and lists of them are the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.prepared import arrays_of, prepared, table
from tests.support.small_tokenizers import CHATML, chatml

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
ROWS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"say {n}"},
            {"role": "assistant", "content": "red", "tool_calls": [CALL]},
        ],
        "tools": TOOLS,
        "answer": n,
    }
    for n in range(6)
]
TEMPLATE = "{{ tools }}" + CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m.get('tool_calls', '') }}")


def as_text(value: Any) -> str:
    return json.dumps(value)


def as_items(value: Any) -> list[str]:
    return [json.dumps(item) for item in value]


def written(tmp_path: Path, form: Callable[[Any], Any]) -> Path:
    rows = [row | {name: form(row[name]) for name in ("messages", "tools")} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def features(tmp_path: Path) -> Path:
    kind = datasets.List(datasets.Json())
    names = datasets.Features({"messages": kind, "tools": kind, "answer": datasets.Value("int64")})
    datasets.Dataset.from_list(ROWS, features=names).to_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def whole_features(tmp_path: Path) -> Path:
    """One value of JSON for all messages of a chat."""
    names = datasets.Features(
        {"messages": datasets.Json(), "tools": datasets.Json(), "answer": datasets.Value("int64")}
    )
    datasets.Dataset.from_list(ROWS, features=names).to_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def inner_features(tmp_path: Path) -> Path:
    """Messages with a key of JSON."""
    names = datasets.Features(
        {
            "messages": datasets.List(
                {
                    "role": datasets.Value("string"),
                    "content": datasets.Value("string"),
                    "tool_calls": datasets.List(datasets.Json()),
                }
            ),
            "tools": datasets.List(datasets.Json()),
            "answer": datasets.Value("int64"),
        }
    )
    datasets.Dataset.from_list(ROWS, features=names).to_parquet(tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "text": lambda tmp_path: written(tmp_path, as_text),
    "texts of items": lambda tmp_path: written(tmp_path, as_items),
    "features": features,
    "one feature": whole_features,
    "inner features": inner_features,
}


def run(tmp_path: Path, source: Path, name: str, **options: Any) -> dict[str, Any]:
    tokenizer = chatml()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepared(source, tmp_path / name, tokenizer=str(tmp_path / "tokenizer"), chat=True, **options)
    return arrays_of(tmp_path / name)


@pytest.mark.parametrize("form", SOURCES)
def test_chats_in_columns_of_json_are_those_of_json_lines(tmp_path: Path, form: str) -> None:
    lines = run(tmp_path, table(tmp_path / "rows.jsonl", *ROWS), "lines")
    found = run(tmp_path, SOURCES[form](tmp_path), "found")
    for name, array in lines.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("form", ["text", "texts of items", "features", "one feature"])
def test_prompts_in_columns_of_json_are_those_of_json_lines(tmp_path: Path, form: str) -> None:
    options = {"prompt_column": "messages", "answer_column": "answer", "seq_len": 512}
    lines = run(tmp_path, table(tmp_path / "rows.jsonl", *ROWS), "lines", **options)
    found = run(tmp_path, SOURCES[form](tmp_path), "found", **options)
    for name, array in lines.items():
        np.testing.assert_array_equal(found[name], array)
