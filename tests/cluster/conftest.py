"""One local Ray for each module, and a small corpus to train on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from tests.support.forked_workers import workers_are_forked

__all__ = ["workers_are_forked"]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray with four logical CPUs, so that small jobs fit beside each other whatever the machine has."""
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=300_000_000,
        include_dashboard=False,
        log_to_driver=False,
        namespace="tests",
    )
    yield
    ray.shutdown()
