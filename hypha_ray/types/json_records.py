"""Records as JSON that keeps what JSON has no form for: tuples, and tables whose keys aren't text.

Functions that score answers compare grids, which are tuples of tuples, with `==`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
