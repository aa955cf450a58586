"""Kinds of datasets that a user brings: samples of their function, split and written as those of other kinds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hypha_ray.data.manifest import Manifest
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.slices import read_slice
from hypha_ray.errors import ConfigError
from tests.support.prepared import prepared

MODULE = """
import numpy as np


def series(rows, tokenizer):
    for row in rows:
        values = np.array(row["values"], np.float32)
        yield {"past_values": values[:-1], "future_values": values[-1:]}


def tokens(rows, tokenizer):
    for row in rows:
        ids = np.array(tokenizer(row["text"])["input_ids"], np.int32)
        yield {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def ragged(rows, tokenizer):
    for row in rows:
        yield {"values": np.array(row["values"][: len(row["text"])], np.float32)}


def raises(rows, tokenizer):
    return [row["lost"] for row in rows]


def texts(rows, tokenizer):
    return [{"text": row["text"]} for row in rows]


def numbered(rows, tokenizer):
    return [{3: row["values"]} for row in rows]


def reused(rows, tokenizer):
    values = np.zeros(3, np.float32)
    for row in rows:
        values[:] = row["values"]
        yield {"values": values}


class Series:
    def __init__(self):
        self.last = -1

    def __call__(self, rows, tokenizer):
        for row in rows:
            yield {"value": np.array(row["values"][self.last], np.float32)}


class Broken(Series):
    def __init__(self):
        raise OSError("no file")


def nothing(rows, tokenizer):
    return []


def alone(rows):
    return []
"""
ROWS = [{"values": [number, number + 1, number + 2], "text": "ab" if number else "a"} for number in range(40)]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_kinds.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "own_kinds", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    return str(file)


def made(source: str, name: str, **options: Any) -> tuple[Manifest, dict[str, dict[str, np.ndarray]]]:
    """The manifest, and the tensors of both splits."""
    manifest = prepared(source=source, out="made", kind=f"own_kinds:{name}", samples_per_slice=8, **options)
    splits = {}
    for split in ("train", "validation"):
        parts = [read_slice(Path("made"), info, manifest) for info in manifest.of(split)]
        splits[split] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return manifest, splits


def test_samples_of_a_function_are_split_and_written(source: str) -> None:
    manifest, splits = made(source, "series", validation_fraction=0.25)
    assert manifest.modality == "other" and manifest.preprocessor is None
    assert (manifest.samples("train"), manifest.samples("validation")) == (30, 10)
    firsts = [*splits["train"]["past_values"][:, 0], *splits["validation"]["past_values"][:, 0]]
    assert sorted(firsts) == list(range(40))
    for arrays in splits.values():
        assert (arrays["future_values"][:, 0] == arrays["past_values"][:, 0] + 2).all()


def test_tokens_of_a_function_have_the_tokenizer_beside_them(source: str) -> None:
    rows = [{"text": f"{number:04d}"} for number in range(20)]
    Path(source).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    manifest, splits = made(source, "tokens", tokenizer="characters")
    assert manifest.modality == "language"
    assert manifest.preprocessor is not None and Path("made", str(manifest.preprocessor.folder)).is_dir()
    assert splits["train"]["input_ids"].shape[1] == 4


def test_arrays_that_a_function_fills_again_and_again_are_copied(source: str) -> None:
    _, splits = made(source, "reused", validation_fraction=0.25)
    assert sorted([*splits["train"]["values"][:, 0], *splits["validation"]["values"][:, 0]]) == list(range(40))


def test_class_is_made_before_it_is_called(source: str) -> None:
    _, splits = made(source, "Series", validation_fraction=0.25)
    assert sorted([*splits["train"]["value"], *splits["validation"]["value"]]) == list(range(2, 42))


def test_manifest_tells_the_function_and_the_hash_of_its_source(source: str) -> None:
    first = made(source, "series")[0].made_by
    Path("own_kinds.py").write_text(MODULE + "\n# Changed.\n", encoding="utf-8")
    other = made(source, "series", overwrite=True)[0].made_by
    assert first is not None and other is not None
    assert first.options["kind"] == other.options["kind"] == "own_kinds:series"
    assert first.options["kind_sha256"] != other.options["kind_sha256"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ragged", r"PREP014.*sample 1 with values float32 \[2\], sample 0 with values float32 \[1\]"),
        ("raises", "PREP014.*own_kinds:raises.*KeyError: 'lost'"),
        ("texts", r"PREP014.*got 'text' of dtype <U\d"),
        ("numbered", "PREP014.*got 3 of dtype int64"),
        ("Broken", "PREP014.*OSError: no file"),
        ("nothing", "PREP014.*no sample"),
        ("alone", "PLG002.*can't be called with 2 arguments"),
        ("gone", "PLG002.*own_kinds:gone can't be loaded"),
    ],
)
def test_function_that_breaks_the_contract_is_refused_and_nothing_is_left(source: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(source, name)
    assert not Path("made").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "tests"}, "PLG001.*did you mean 'texts'"),
        ({"kind": "texts"}, "PREP007.*--kind texts and the other options exclude each other.*documents"),
        ({"kind": "mine:rows", "label_column": "x"}, "PREP007.*--label-column has no effect on --kind mine:rows"),
        ({"kind": "mine:rows", "source": "stdlib"}, "PREP007.*--source stdlib has no rows"),
        ({"kind": "mine:rows", "part": "0/2"}, "PREP007.*--part has no effect"),
    ],
)
def test_options_that_do_not_fit_a_kind_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareOptions(**({"source": "rows.jsonl", "out": "made"} | given)).check()


def test_kind_of_the_package_may_be_named() -> None:
    options = PrepareOptions(source="rows.jsonl", out="made", kind="texts", label_column="label")
    options.check()
    assert options.kind_name == "texts"
