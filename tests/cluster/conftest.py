"""One local Ray for each module, and a small corpus to train on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clusters import single_node
from tests.support.forked_workers import workers_are_forked

__all__ = ["workers_are_forked"]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with four logical CPUs."""
    with single_node():
        yield
