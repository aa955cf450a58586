"""Tests that are marked `long`: those of minutes beside shorter ones, and most cases of large tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest


def long_tests(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that a short run leaves out; of each function, all but as many cases as its mark keeps."""
    cases_by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    keep_by_function: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("long")
        if mark is not None:
            function = item.nodeid.partition("[")[0]
            cases_by_function[function].append(item)
            keep_by_function[function] = mark.kwargs.get("keep", 0)
    left_out: list[pytest.Item] = []
    for function, cases in cases_by_function.items():
        kept_numbers = spread(len(cases), keep_by_function[function])
        left_out += [case for number, case in enumerate(cases) if number not in kept_numbers]
    return left_out


def spread(count: int, keep: int) -> set[int]:
    """Return the numbers of `keep` of `count` cases, at equal distances from the first to the last."""
    if keep < 2:
        return set(range(min(keep, count)))
    return {round(number * (count - 1) / (keep - 1)) for number in range(keep)}
