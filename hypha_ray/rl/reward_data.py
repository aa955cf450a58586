"""Records of prompts in a slice, for reward functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hypha_ray.errors import DataError
from hypha_ray.types.data import unpack_records


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
