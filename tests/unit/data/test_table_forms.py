"""Tables as other tools have them: fields within columns, columns of JSON, Arrow's files, and compressed texts."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import feather, ipc, parquet

from hypha_ray.errors import ConfigError, DataError
from hypha_ray.rl.rewards.response import unpack_records
from tests.support.prepared import arrays_of, omissions, prepared, table
from tests.support.small_tokenizers import CHATML, chatml

VERL: list[dict[str, Any]] = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{n} + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(12)
]
"""Rows as verl's own examples have them."""
FIELDS = {
    "prompt_column": "prompt.0.content",
    "answer_column": "reward_model.ground_truth",
    "keep_columns": ["data_source", "extra_info.index"],
}
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


def as_lines(path: Path) -> Path:
    return table(path / "rows.jsonl", *VERL)


def as_parquet(path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(VERL), path / "rows.parquet")
    return path / "rows.parquet"


def as_csv(path: Path) -> Path:
    with (path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(VERL[0])
        for row in VERL:
            writer.writerow([value if isinstance(value, str) else json.dumps(value) for value in row.values()])
    return path / "rows.csv"


def as_arrow(path: Path) -> Path:
    rows = pyarrow.Table.from_pylist(VERL)
    with ipc.new_file(path / "rows.arrow", rows.schema) as file:
        file.write_table(rows)
    return path / "rows.arrow"


def as_stream(path: Path) -> Path:
    """The file in a folder that `datasets` saves."""
    datasets.Dataset.from_list(VERL).save_to_disk(path / "saved")
    return next((path / "saved").glob("*.arrow"))


def as_saved(path: Path) -> Path:
    return as_stream(path).parent


def as_feather(path: Path) -> Path:
    feather.write_feather(pyarrow.Table.from_pylist(VERL), path / "rows.feather")
    return path / "rows.feather"


FORMS = [as_lines, as_parquet, as_csv, as_arrow, as_stream, as_saved, as_feather]


@pytest.mark.parametrize("form", FORMS)
def test_fields_of_columns_are_columns_in_every_form_of_a_table(form: Callable[[Path], Path], tmp_path: Path) -> None:
    manifest = prepared(form(tmp_path), tmp_path / "out", **FIELDS, validation_fraction=0.0)
    records = unpack_records(arrays_of(tmp_path / "out")["reward_data"])
    index = "0" if form is as_csv else 0
    assert sorted(records, key=lambda record: int(record["answer"]))[0] == {
        "task": "exact",
        "answer": "1",
        "data_source": "sums",
        "extra_info.index": int(index),
    }
    assert len(records) == 12
    (unused,) = [one for one in manifest.origin.omissions if one.what == "columns"] if manifest.origin else []
    assert set(unused.names) == {"prompt.0.role", "reward_model.style", "extra_info.split"}


def test_column_whose_own_name_has_a_dot_is_preferred_to_a_field(tmp_path: Path) -> None:
    rows = [{"q": f"say {n}", "a.b": f"column {n}", "a": {"b": f"field {n}"}} for n in range(4)]
    source = table(tmp_path / "rows.jsonl", *rows)
    prepared(source, tmp_path / "out", prompt_column="q", answer_column="a.b", keep_columns=["a"], validation_samples=0)
    records = unpack_records(arrays_of(tmp_path / "out")["reward_data"])
    assert {record["answer"] for record in records} == {f"column {n}" for n in range(4)}
    assert all(set(record["a"]) == {"b"} for record in records)


def test_missing_field_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    for form in (as_lines, as_parquet):
        with pytest.raises(DataError, match=r"DATA032.*no column 'reward_model\.truth'.*reward_model\.ground_truth"):
            prepared(form(tmp_path), tmp_path / "out", **{**FIELDS, "answer_column": "reward_model.truth"})


def test_row_without_the_outer_column_or_the_item_of_a_list_is_counted(tmp_path: Path) -> None:
    """Answers as of SQuAD, some of which have none."""
    answers = [{"text": ["blue", "sky"]}, {"text": []}, None, {"text": ["red"]}, {"text": ["green"]}]
    source = table(tmp_path / "rows.jsonl", *({"q": f"{n}?", "answers": one} for n, one in enumerate(answers)))
    manifest = prepared(source, tmp_path / "out", prompt_column="q", answer_column="answers.text.0")
    assert omissions(manifest)["rows without an answer"] == 2


def test_names_of_classes_are_found_for_a_field(tmp_path: Path) -> None:
    kind = datasets.Features(
        {"row": {"text": datasets.Value("string"), "mood": datasets.ClassLabel(names=["sad", "calm"])}}
    )
    rows = [{"row": {"text": f"text {n}", "mood": n % 2}} for n in range(8)]
    datasets.Dataset.from_list(rows, features=kind).save_to_disk(tmp_path / "saved")
    manifest = prepared(tmp_path / "saved", tmp_path / "out", text_column="row.text", label_column="row.mood")
    assert manifest.classes is not None and manifest.classes.names == ("sad", "calm")


def test_dotted_columns_of_chats_and_of_preferences_are_fields(tmp_path: Path) -> None:
    rows = [{"x": {"q": f"Q{n}:", "good": f" yes{n}", "bad": f" no{n}"}} for n in range(6)]
    source = table(tmp_path / "rows.jsonl", *rows)
    named = {"prompt_column": "x.q", "chosen_column": "x.good", "rejected_column": "x.bad"}
    assert prepared(source, tmp_path / "preferences", **named, validation_samples=0).samples("train") == 6
    chats = prepared(source, tmp_path / "chats", prompt_column="x.q", completion_column="x.good", validation_samples=0)
    assert chats.samples("train") == 6


def test_several_fields_of_one_list_or_of_nothing_are_all_there(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"q": f"{n}?", "x": {"m": [{"a": n, "b": n + 1}, n + 2]}} for n in range(6)]
    rows[3] = {"q": "3?", "x": None}
    kept = ["x", "x.m.0.a", "x.m.0.b", "x.m.1", "x.m.7"]
    prepared(table(tmp_path / "rows.jsonl", *rows), tmp_path / "out", prompt_column="q", keep_columns=kept)
    for record in unpack_records(arrays_of(tmp_path / "out")["reward_data"]):
        n = record["x.m.0.a"]
        expected = [None, None, None] if n is None else [n, n + 1, n + 2]
        assert [record[name] for name in kept[1:]] == [*expected, None]
        assert record["x"] == (None if n is None else {"m": [{"a": n, "b": n + 1}, n + 2]})


def test_rows_of_one_json_document_are_its_list_or_its_data(tmp_path: Path) -> None:
    rows = [{"q": f"{n}?", "a": n} for n in range(6)]
    for indent in (None, 1):
        for number, document in enumerate([rows, {"version": "1", "data": rows}]):
            (tmp_path / "rows.json").write_text(json.dumps(document, indent=indent))
            out = tmp_path / f"{indent}-{number}"
            prepared(tmp_path / "rows.json", out, prompt_column="q", answer_column="a", validation_samples=0)
            assert len(arrays_of(out)["reward_data"]) == 6


def test_two_columns_of_one_name_are_refused_if_they_are_used(tmp_path: Path) -> None:
    texts = pyarrow.array([f"text {n}" for n in range(8)])
    rows = pyarrow.Table.from_arrays([texts, texts, texts], ["q", "a", "a"])
    feather.write_feather(rows, tmp_path / "rows.feather")
    prepared(tmp_path / "rows.feather", tmp_path / "out", prompt_column="q")
    for columns in ({"prompt_column": "q", "answer_column": "a"}, {"prompt_column": "q", "completion_column": "a"}):
        with pytest.raises(DataError, match=r"DATA032.*two columns of the same name"):
            prepared(tmp_path / "rows.feather", tmp_path / "other", **columns)


def test_date_that_python_lacks_is_one_error(tmp_path: Path) -> None:
    dates = pyarrow.array([2**58] * 4, pyarrow.timestamp("ms"))
    rows = pyarrow.table({"prompt": ["a", "b", "c", "d"], "completion": ["e"] * 4, "at": dates})
    parquet.write_table(rows, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"DATA031.*has values that Python lacks"):
        prepared(tmp_path / "rows.parquet", tmp_path / "out", prompt_column="prompt", completion_column="completion")
    prepared(tmp_path / "rows.parquet", tmp_path / "out", prompt_column="prompt")


def test_decimals_that_are_whole_numbers_are_names_of_classes(tmp_path: Path) -> None:
    labels = [None if n == 7 else Decimal(n % 2) for n in range(8)]
    texts = [f"text {n}" for n in range(8)]
    rows = pyarrow.table({"text": texts, "label": pyarrow.array(labels, pyarrow.decimal128(5, 1))})
    parquet.write_table(rows, tmp_path / "rows.parquet")
    manifest = prepared(tmp_path / "rows.parquet", tmp_path / "out", label_column="label")
    assert manifest.classes is not None and manifest.classes.names == ("0", "1")
    assert omissions(manifest)["rows without a label"] == 1


# ── compressed texts ──────────────────────────────────────────────────────────────────────────────────────────────────

TEXT = "".join(f"line {n} of a text that is long enough to have several samples\n" for n in range(200)).encode()


def compressed(path: Path, codec: str, text: bytes = TEXT) -> Path:
    with pyarrow.CompressedOutputStream(str(path), codec) as file:
        file.write(text)
    return path


@pytest.mark.parametrize(("suffix", "codec"), [(".zst", "zstd"), (".lz4", "lz4")])
def test_compressed_text_is_that_of_the_plain_one(tmp_path: Path, suffix: str, codec: str) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    prepared(tmp_path / "a.txt", tmp_path / "plain")
    once = compressed(tmp_path / f"a.txt{suffix}", codec)
    prepared(once, tmp_path / "packed")
    assert np.array_equal(arrays_of(tmp_path / "packed")["input_ids"], arrays_of(tmp_path / "plain")["input_ids"])
    once.write_bytes(once.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"DATA031.*can't be read"):
        prepared(once, tmp_path / "cut")


def test_damaged_or_packed_table_has_its_remedy(tmp_path: Path) -> None:
    arrow = as_arrow(tmp_path)
    arrow.write_bytes(arrow.read_bytes()[:300])
    with pytest.raises(DataError, match=r"DATA031.*isn't an Arrow file.*copy it afresh"):
        prepared(arrow, tmp_path / "out", **FIELDS)
    packed = compressed(tmp_path / "rows.parquet.zst", "zstd", as_parquet(tmp_path).read_bytes())
    with pytest.raises(DataError, match=r"DATA031.*isn't a Parquet file.*unpack it first"):
        prepared(packed, tmp_path / "out", **FIELDS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b'{"train": [{"text": "a"}]}', r"jq -c '\.train\[\]'"),
        (b'{"columns": ["text"], "index": [0], "data": [["a"]]}', r"orient='records', lines=True"),
        (b'{"0": {"text": "a"}, "1": {"text": "b"}}', r"orient='records', lines=True"),
        (b'[["a"], ["b"]]', r"orient='records', lines=True"),
        (b'{"text": {"0": "a", "1": "b"}, "n": {"0": 1, "1": 2}}', r"orient='records', lines=True"),
        (b'{\n "text": {\n  "x": "a"\n }\n}', r"orient='records', lines=True"),
        (b'{"x": {"text": "a"}, "y": {"text": "b"}}\n', r"orient='records', lines=True"),
        (b'{"text": ["a", "b"]}', r"DATA032.*by columns.*orient='records', lines=True"),
        (b'{\n "prompt": ["a", "b"],\n "completion": ["c", "d"]\n}', r"DATA032.*by columns.*lines=True"),
        (b'{"messages": [[{"role": "user", "content": "a"}]]}', r"DATA032.*by columns.*lines=True"),
        ('[{"text": "a"}]'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8 a.json"),
    ],
    ids=[
        "splits",
        "split",
        "index",
        "values",
        "columns",
        "indented",
        "names",
        "lists",
        "indented lists",
        "chats",
        "utf-16",
    ],
)
def test_form_that_is_not_read_is_refused_with_the_way_to_convert_it(
    tmp_path: Path, content: bytes, remedy: str
) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=remedy):
        prepared(tmp_path / "a.json", tmp_path / "out")


@pytest.mark.parametrize(
    ("row", "options", "remedy"),
    [
        ({"id": 1, "body": "a"}, {}, r"Fix: name one with --text-column, such as body$"),
        ({"title": "b", "body": "a"}, {}, r"Fix: name one with --text-column$"),
        ({"the body": "a"}, {}, r"such as 'the body'$"),
        ({"Review": "a", "title": "b"}, {"text_column": "review"}, r"such as Review$"),
        ({"Question": "a", "answer": "b"}, {"prompt_column": "question"}, r"--prompt-column, such as Question$"),
        ({"dialog": [{"role": "user", "content": "a"}]}, {}, r"--chat --messages-column dialog, or"),
        ({"dialog": [{"role": "user", "content": "a"}]}, {"chat": True}, r"Fix: .*--messages-column dialog$"),
        (dict.fromkeys(map(str, range(400)), 1), {}, r"got [^—]*, 115 and 380 more\. Fix"),
    ],
)
def test_column_that_is_not_there_is_told_with_the_one_that_may_be_meant(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(DataError, match=remedy):
        prepared(table(tmp_path / "a.jsonl", row, row), tmp_path / "out", **options)


def test_split_that_a_saved_dataset_lacks_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "a b c"}] * 3)
    datasets.DatasetDict({"training": rows, "validation": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        DataError, match=r"no split 'train' — allowed training, validation\. Fix: choose one by --split"
    ):
        prepared(tmp_path / "saved", tmp_path / "out")


def test_options_of_splits_beside_files_are_refused_and_files_of_several_splits_are_noted(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    source = table(tmp_path / "texts" / "train.jsonl", *({"text": f"a b c {n}"} for n in range(9)))
    table(source.parent / "test.jsonl", {"text": "the answer"})
    for path, options in ((source, {"split": "test"}), (source, {"subset": "a"}), (source.parent, {"split": "test"})):
        with pytest.raises(ConfigError, match=r"PREP007.*has no effect on files"):
            prepared(path, tmp_path / "out", **options)
    manifest = prepared(source.parent, tmp_path / "out", seq_len=4)
    assert manifest.origin is not None
    assert any("test.jsonl and train.jsonl are read as one" in note for note in manifest.origin.notes)


def test_current_folder_of_parquet_files_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(pyarrow.table({"text": [f"a b c {n}" for n in range(9)]}), tmp_path / "rows.parquet")
    monkeypatch.chdir(tmp_path)
    assert prepared(Path(), tmp_path.parent / f"{tmp_path.name}-out", seq_len=4).samples("train")


def test_prepared_dataset_is_no_source(tmp_path: Path) -> None:
    prepared(table(tmp_path / "a.jsonl", {"text": "a b c d"}), tmp_path / "data", seq_len=4)
    with pytest.raises(DataError, match=r"DATA030.*is a prepared dataset.*--dataset\.path"):
        prepared(tmp_path / "data", tmp_path / "out")


def test_kind_without_its_options_is_refused_with_them(tmp_path: Path) -> None:
    source = table(tmp_path / "a.jsonl", {"messages": []})
    with pytest.raises(ConfigError, match=r"Fix: add --chat or --messages-column"):
        prepared(source, tmp_path / "out", kind="chats")
    with pytest.raises(ConfigError, match=r"Fix: leave --kind out"):
        prepared(source, tmp_path / "out", kind="pairs", chat=True)


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
