"""Records of prompts in a slice, for reward functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import DataError

_TUPLE = "hypha_ray:tuple"
_PAIRS = "hypha_ray:pairs"


def records_of(rows: npt.NDArray[np.generic]) -> list[dict[str, Any]]:
    """Return the record of each prompt.

    Args:
        rows: the tensor `reward_data` of a slice, uint8 [N, A].

    Raises:
        DataError: RL029, a row isn't the JSON of a record.

    """
    return [_record(number, row) for number, row in enumerate(np.asarray(rows))]


def _record(number: int, row: npt.NDArray[np.generic]) -> dict[str, Any]:
    try:
        (record,) = unpack_records(row[None])
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        problem = "a slice of prompts has a damaged record"
        fix = "prepare the dataset again by jobs/prepare.py"
        raise DataError("RL029", problem, f"row {number} of reward_data", "the JSON of a table", fix)
    return record


def to_json(record: Mapping[str, Any]) -> str:
    """Write a record as JSON, in one line, which keeps tuples and keys that aren't text.

    Functions that score answers compare grids, which are tuples of tuples, with `==`.

    Raises:
        TypeError: a value is none of JSON's, and no tuple.

    """
    return json.dumps(_marked(record), ensure_ascii=False, separators=(",", ":"))


def from_json(text: str | bytes) -> dict[str, Any]:
    """Read what `to_json` wrote, or any other table in JSON."""
    record: dict[str, Any] = json.loads(text, object_hook=_unmarked)
    return record


def _marked(value: Any) -> Any:
    if isinstance(value, tuple):
        return {_TUPLE: [_marked(part) for part in value]}
    if isinstance(value, list):
        return [_marked(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if all(isinstance(key, str) for key in value):
        return {key: _marked(part) for key, part in value.items()}
    return {_PAIRS: [[_marked(key), _marked(part)] for key, part in value.items()]}


def _unmarked(table: dict[str, Any]) -> Any:
    if len(table) == 1 and isinstance(parts := table.get(_TUPLE), list):
        return tuple(parts)
    if len(table) == 1 and isinstance(pairs := table.get(_PAIRS), list):
        return dict(pairs)
    return table


def pack_records(records: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.uint8]:
    """Encode records as a slice's tensor ``reward_data``: uint8 [N, A], where A is the length of the longest one.

    A row is JSON in UTF-8 with zeros behind it, such as ``{"task": "gsm8k", "answer": "72"}``.

    Raises:
        TypeError: a value is none of JSON's, and no tuple.

    """
    texts = [to_json(record).encode() for record in records]
    rows = np.zeros((len(texts), max(map(len, texts))), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows


def unpack_records(rows: npt.NDArray[np.generic]) -> list[dict[str, Any]]:
    """Decode a result of `pack_records`."""
    records: list[dict[str, Any]] = []
    for row in np.asarray(rows, np.uint8):
        text = bytes(row).rstrip(b"\0")
        records.append(from_json(text))
    return records
