"""A process that crashes is noticed by the tests' own clusters, even where a run recovers from it."""

from __future__ import annotations

import faulthandler

import pytest
import ray

from hypha_ray.simulation.world import VirtualClock
from tests.support.clusters import single_node


@ray.remote(max_retries=0)
def crash_in_package() -> None:
    clock = VirtualClock()
    clock.later(0, faulthandler._sigabrt)  # type: ignore[attr-defined]
    clock.advance(1)


def test_crash_in_this_package_ends_the_cluster_with_an_error() -> None:
    expected = pytest.raises(AssertionError, match=r"Aborted[^$]*simulation/world.py")
    with expected, single_node(), pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(crash_in_package.remote())
