"""Records of prompts in slices: tensor ``reward_data``, uint8 [N, A], JSON in UTF-8 with zeros behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hypha_ray.types.json_records import from_json, to_json


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
    return [from_json(bytes(row).rstrip(b"\0")) for row in np.asarray(rows, np.uint8)]
