"""Rejected deltas, damaged samples, responses to be shown: what the scheduler tells workers and users of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.types import Damaged, Delta, RolloutReport, Source, WorkerWarned
from tests.support.fleet import Faults, Fleet, done, fleet_of, job_of, rounds, slices_of


def poisoned(*ordinals: int) -> Callable[[Delta], str | None]:
    """Reject these of worker 1's deltas, by their order."""
    seen: list[Delta] = []

    def reject(delta: Delta) -> str | None:
        if delta.source.worker != 1:
            return None
        seen.append(delta)
        return "non-finite values" if len(seen) - 1 in ordinals else None

    return reject


@pytest.mark.parametrize("strategy", ["diloco", "sync", "async"])
def test_worker_hears_in_its_next_plan_that_its_delta_was_rejected(strategy: str) -> None:
    fleet = fleet_of(0.1, 0.1, faults=Faults(reject=poisoned(1, 2)), update_rounds=8, sync={"strategy": strategy})
    plans = [command for _, command in done(fleet).commanded(c.Assign)]
    told = {worker: [one.plan.rejections for one in plans if one.worker == worker] for worker in (0, 1)}
    assert set(told[0]) == {0}
    assert sorted(set(told[1])) == [0, 1, 2] and told[1] == sorted(told[1])


def test_successor_of_a_worker_whose_delta_was_rejected_begins_with_no_inner_state() -> None:
    job = job_of(run={"name": "virtual", "mode": "replay"}, rounds=rounds(5))
    fleet = Fleet(job, [0.1, 0.1], slices_of(20, 64), Faults(reject=poisoned(1)))
    for worker in (0, 1):
        fleet.later(12.0, partial(fleet.kill, worker))
    restored = [command for _, command in done(fleet).commanded(c.Assign) if command.plan.restores]
    assert [(command.worker, command.plan.round) for command in restored] == [(0, 2)]


def test_damaged_samples_are_named_and_nobody_is_blamed() -> None:
    fleet = fleet_of(0.1, 0.1)
    source = Source("virtual", 1, 10_001)
    fleet.later(1.0, lambda: fleet.tell(Damaged(source, 0, ((4, 17),), whole=True)))
    fleet.later(1.1, lambda: fleet.tell(Damaged(source, 0, tuple((5, n) for n in range(20)), whole=False)))
    done(fleet)
    named = [note for note in fleet.notes if note["kind"] == "damaged"]
    assert {name: named[0][name] for name in ("worker", "slice", "sample", "whole_batch")} == {
        "worker": 1,
        "slice": 4,
        "sample": 17,
        "whole_batch": True,
    }
    assert [note["sample"] for note in named[1:]] == list(range(8))
    texts = [note["text"] for note in fleet.noted("problem")]
    assert texts == [
        "slice 4, sample 17: no finite loss and gradient, the batch is skipped",
        "slice 5, sample 0 and 19 more: no finite loss and gradient, left out",
    ]
    assert not fleet.noted("loss") and not fleet.noted("exclude")


def test_responses_that_are_shown_are_told_one_by_one() -> None:
    fleet = fleet_of(0.1, 0.1)
    shown = RolloutReport(
        Source("virtual", 1, 10_001), 0, ({"response": "38", "reward": 1.0}, {"response": "83", "reward": 0.0})
    )
    fleet.later(1.0, lambda: fleet.tell(shown))
    done(fleet)
    told = fleet.noted("rollout")
    assert [(note["round"], note["worker"], note["response"], note["reward"]) for note in told] == [
        (0, 1, "38", 1.0),
        (0, 1, "83", 0.0),
    ]


def test_what_failed_beside_a_workers_training_is_told_with_its_number() -> None:
    fleet = fleet_of(0.1, 0.1)
    warned = WorkerWarned(Source("virtual", 1, 10_001), 0, ("the policy was not saved", "weights can't be written"))
    fleet.later(1.0, lambda: fleet.tell(warned))
    done(fleet)
    texts = [note["text"] for note in fleet.noted("problem")]
    assert texts == ["worker 1: the policy was not saved", "worker 1: weights can't be written"]
