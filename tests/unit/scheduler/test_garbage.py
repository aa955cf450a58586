"""Search for garbage in the scheduler's process: as Python has it, unless the fleet is large."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from hypha_ray.scheduler.core import search_less_often


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("workers", "objects"), [(2, 700), (35, 700), (10_000, 200_000)])
def test_search_less_often_grows_with_the_fleet(workers: int, objects: int) -> None:
    search_less_often(workers)
    assert gc.get_threshold() == (objects, 10, 10)
