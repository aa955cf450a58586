"""Records of prompts in slices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hypha_ray.errors import DataError
from hypha_ray.rl.rewards.response import pack_records, records_of


def test_records_come_back_as_they_were_packed() -> None:
    records = [{"answer": "72"}, {"answer": "ü", "more": [1, None]}]
    assert records_of(pack_records(records)) == records


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"answer": "7', id="cut"),
        pytest.param(b"", id="zeros"),
        pytest.param(b"\xff\xfe{}", id="letters"),
        pytest.param(b"[1, 2]", id="list"),
        pytest.param(b"7", id="number"),
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_a_damaged_record_is_one_clear_error(text: bytes) -> None:
    whole: Any = json.dumps({"answer": "1"}).encode()
    width = max(len(whole), len(text))
    rows = np.stack([np.frombuffer(one.ljust(width, b"\0"), np.uint8) for one in (whole, text)])
    with pytest.raises(DataError, match=r"RL029.*row 1 of reward_data"):
        records_of(rows)
