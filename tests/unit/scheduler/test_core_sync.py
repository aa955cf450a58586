"""Synchronous steps as the scheduler's core plans them, on a virtual clock."""

from __future__ import annotations

import pytest

from hypha_ray.scheduler.worker_state import batch_size
from tests.support.fleet import FIRST_ONLY, done, fleet_of, job_of, used

SYNC = {"strategy": "sync"}


@pytest.mark.parametrize(("samples", "most", "expected"), [(64, 32, 32), (100, 32, 25), (8, 32, 4), (3, 4, 2)])
def test_batches_are_evened_out(samples: int, most: int, expected: int) -> None:
    rounds = {"samples_between_updates": samples, "max_batch_size": most}
    assert batch_size(job_of(rounds=rounds, sync=SYNC)) == expected
    assert batch_size(job_of(rounds=rounds)) == most


def test_slow_worker_has_as_many_batches_as_a_fast_one_and_no_plan_is_corrected() -> None:
    fleet = done(fleet_of(0.1, 5.0, update_rounds=4, samples=16, sync=SYNC))
    assert [record["batches"] for record in fleet.of_kind("round")] == [{0: 2, 1: 2}] * 4
    assert not fleet.noted("correction")


@pytest.mark.parametrize(("killed_s", "first"), [(0.6, 2), (1.6, 1)])
def test_batch_of_a_lost_worker_goes_to_another_in_this_step_or_in_a_later_one(killed_s: float, first: int) -> None:
    fleet = fleet_of(1.0, 2.0, faults=FIRST_ONLY, update_rounds=4, samples=8, sync=SYNC)
    fleet.later(0.1 + killed_s, lambda: fleet.kill(1))
    done(fleet)
    assert [record["batches"] for record in fleet.of_kind("round")] == [{0: first}, {0: 2}, {0: 2}, {0: 2}]
    assert len(used(fleet)) == 4 * (first + 6)
