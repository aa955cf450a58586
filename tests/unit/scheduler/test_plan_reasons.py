"""Reasons of workers' numbers of batches, as `plan` events have them."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.worker_plans import BEAT, EQUAL, NOISE, NOT_NEEDED, REST, SPEED, UNKNOWN, ReasonBook
from hypha_ray.scheduler.worker_state import WorkerState
from hypha_ray.types import Plan, Source, Span
from tests.support.epochs import with_epochs
from tests.support.fleet import Fleet, fleet_of, job_of, slices_of


def explained(fleet: Fleet) -> list[dict[str, Any]]:
    """Run a fleet; return its `plan` events with the reasons that the core gives for them."""
    plans: list[dict[str, Any]] = []

    def watch(command: c.Command) -> None:
        if isinstance(command, c.LogEvent) and command.fields["kind"] == "plan":
            batches = command.fields["batches"]
            plans.append({**command.fields, **fleet.core.plan_reasons(batches)})

    fleet.watchers.append(watch)
    fleet.run()
    assert fleet.error is None
    return plans


def test_speeds_are_unknown_first_and_then_the_reason_with_the_finish_that_comes_true() -> None:
    fleet = fleet_of(0.1, 0.25, update_rounds=4, samples=640, slices=slices_of(60, 64, 0))
    plans = explained(fleet)
    assert plans[0]["reasons"] == {0: UNKNOWN, 1: UNKNOWN}
    assert plans[0]["finish_s"] == {0: None, 1: None}
    assert plans[3]["reasons"] == {0: SPEED, 1: SPEED}
    finish_s = fleet.of_kind("round")[3]["finish_s"]
    assert max(plans[3]["finish_s"].values()) == pytest.approx(finish_s, rel=0.02)


def test_worker_without_a_batch_is_not_needed() -> None:
    plans = explained(fleet_of(0.1, 60.0, update_rounds=2, samples=1600, slices=slices_of(60, 64, 0)))
    assert plans[1]["batches"][1] == 0
    assert plans[1]["reasons"] == {0: SPEED, 1: NOT_NEEDED}
    assert plans[1]["finish_s"][1] is None


def test_noisy_worker_has_fewer_batches_for_its_noise() -> None:
    seconds = iter([0.05, 0.15] * 5000)
    fleet = fleet_of(0.1, lambda now: next(seconds), update_rounds=5, samples=640, slices=slices_of(60, 64, 0))
    assert explained(fleet)[4]["reasons"][1] == NOISE


def test_equal_batches_are_the_reason_where_speeds_count_for_nothing() -> None:
    sync = {"dynamic_local_steps": False}
    plans = explained(fleet_of(0.1, 0.2, update_rounds=3, samples=320, sync=sync, slices=slices_of(60, 64, 0)))
    assert {reason for plan in plans[:3] for reason in plan["reasons"].values()} == {EQUAL}
    assert plans[2]["finish_s"][1] == pytest.approx(2 * plans[2]["finish_s"][0], rel=0.1)


def test_more_workers_than_batches_leave_some_without_need() -> None:
    slices = slices_of(1, 90, 0)
    rounds = {"samples_between_updates": 40, "max_batch_size": 8}
    job = with_epochs(job_of(rounds=rounds, resources={"num_workers": 3}), slices, 1)
    last = explained(Fleet(job, [0.1, 0.1, 0.1], slices))[2]
    assert last["batches"] == {0: 1, 1: 1, 2: 0}
    assert last["reasons"][2] == NOT_NEEDED


@pytest.mark.parametrize(("wanted", "reason"), [(2, SPEED), (3, REST)])
def test_end_of_the_samples_is_the_reason_of_fewer_batches_than_wanted(wanted: int, reason: str) -> None:
    member = WorkerState(Source("run", 4, 1), batch_size=8)
    member.start(Plan(1, 0, (Span(0, 0, 0, 13),), 8))
    book = ReasonBook()
    book.explain(member, SPEED, wanted)
    assert book.fields([4, 5]) == {"reasons": {4: reason}, "finish_s": {4: None}}


def test_without_a_barrier_each_plan_has_the_reason_of_its_worker() -> None:
    sync = {"strategy": "async"}
    plans = explained(fleet_of(0.1, 0.3, update_rounds=4, samples=160, sync=sync, slices=slices_of(60, 64, 0)))
    assert [plan["reasons"].keys() == plan["batches"].keys() for plan in plans].count(False) <= 2  # The final plans.
    reasons = [reason for plan in plans for reason in plan["reasons"].values()]
    assert reasons[:2] == [UNKNOWN, UNKNOWN]
    assert reasons[-1] == BEAT
