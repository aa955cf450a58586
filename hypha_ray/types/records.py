"""Records as JSON that keeps tuples and keys that aren't text, and as rows of bytes in slices of prompts.

Functions that score answers compare grids, which are tuples of tuples, with `==`. A slice holds its records as tensor
``reward_data``, uint8 [N, A]: JSON in UTF-8 with zeros behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_TUPLE = "hypha_ray:tuple"
_PAIRS = "hypha_ray:pairs"


def to_json(record: Mapping[str, Any]) -> str:
    """Write a record as JSON, in one line.

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
    """The records as rows of bytes, uint8 [N, A], A being the length of the longest one.

    Args:
        records: one for each prompt, such as ``{"task": "gsm8k", "answer": "72"}``.

    Raises:
        TypeError: a value is none of JSON's, and no tuple.

    """
    texts = [to_json(record).encode() for record in records]
    rows = np.zeros((len(texts), max(map(len, texts))), np.uint8)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8)
    return rows


def unpack_records(rows: npt.NDArray[np.generic]) -> list[dict[str, Any]]:
    """The records of rows of bytes, uint8 [N, A]."""
    records: list[dict[str, Any]] = []
    for row in np.asarray(rows, np.uint8):
        text = bytes(row).rstrip(b"\0")
        records.append(from_json(text))
    return records
