"""The manifest tells by which command a dataset was made, without secrets, and is else the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypha_ray
from hypha_ray.data.catalogue import load
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import made_by, prepare
from hypha_ray.data.provenance import MadeBy
from tests.support.prepared import prepared, table

DATE = "2026-01-31T12:00:00+00:00"


def test_manifest_has_source_options_version_and_date(tmp_path: Path) -> None:
    source = table(tmp_path / "rows.jsonl", *({"q": f"{n}=", "a": n, "more": n} for n in range(9)))
    options: dict[str, Any] = {
        "prompt_column": "q",
        "answer_column": "a",
        "keep_columns": ["more"],
        "seed": 3,
    }
    out = str(tmp_path / "out")
    prepare(PrepareOptions(str(source), out, seq_len=256, overwrite=True, **options), lambda what, number: None, DATE)
    assert load(tmp_path / "out").made_by == MadeBy(str(source), options, hypha_ray.__version__, DATE)


def test_record_has_no_secrets_of_urls_and_no_place_of_the_dataset() -> None:
    source = "https://me:s3cret@example.com/a.csv?token=abcdef"
    template = Path("a.jinja")
    out = "s3://key:s3cret@bucket/out"
    options = PrepareOptions(source, out, chat=True, chat_template=template, tokenizer="https://x:s3cret@example.com/t")
    record = made_by(options, DATE)
    assert "s3cret" not in repr(record) and "abcdef" not in repr(record)
    assert record.options["chat_template"] == "a.jinja" and "out" not in record.options


def test_identity_of_a_dataset_doesnt_depend_on_the_command_and_its_date(tmp_path: Path) -> None:
    first = prepared("digits", tmp_path / "first", max_samples=40)
    again = prepared("digits", tmp_path / "again", max_samples=40)
    assert first.made_by is not None
    assert first.model_copy(update={"made_by": None}).identity == first.identity == again.identity
