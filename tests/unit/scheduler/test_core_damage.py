"""Damage and blame on a virtual clock: rejected deltas, damaged samples, lost payloads, and fatal work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.failures import LossBook
from hypha_ray.types import Alive, Damaged, Delta, RolloutReport, Source, WorkerWarned
from tests.support.fleet import Faults, Fleet, done, fleet_of, job_of, past_of, rounds, slices_of, used

BAD = "non-finite values"
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "diloco"},
    {"strategy": "sync"},
    {"strategy": "async"},
]
WORK = "reward function hangs:reward on the prompt '07='"


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
    assert not fleet.noted("disable")


def test_settings_that_a_worker_has_disabled_are_told_with_its_incarnation() -> None:
    fleet = fleet_of(0.1, 0.1)
    warned = WorkerWarned(Source("virtual", 1, 10_001), 0, ("it doesn't work",), ("autocast", "compile"))
    fleet.later(1.0, lambda: fleet.tell(warned))
    done(fleet)
    (note,) = fleet.noted("disable")
    assert (note["worker"], note["incarnation"], note["settings"]) == (1, 10_001, ["autocast", "compile"])


def faults(reason: str, *rounds: int, worker: int = 1) -> Faults:
    """A worker's deltas of these rounds aren't merged."""
    return Faults(reject=lambda delta: reason if delta.source.worker == worker and delta.round in rounds else None)


def after(count: int, reason: Callable[[Delta], str | None]) -> Faults:
    """The first deltas are good; what becomes of those after them."""
    seen: list[Delta] = []

    def reject(delta: Delta) -> str | None:
        seen.append(delta)
        return reason(delta) if len(seen) > count else None

    return Faults(reject=reject)


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_worker_whose_payloads_are_lost_again_and_again_is_not_excluded(sync: dict[str, Any]) -> None:
    ill_fated = Faults(reject=lambda delta: LOST if delta.source.worker == 1 and delta.round % 2 else None)
    fleet = done(fleet_of(0.1, 0.1, 0.1, faults=ill_fated, update_rounds=12, sync={**sync, "strikes": 2}))
    assert [note["worker"] for note in fleet.noted("reject")].count(1) >= 3
    assert not fleet.noted("exclude") and not fleet.noted("loss")
    assert fleet.persisted[-1].state["workers"]["1"].get("strikes", 0) == 0


@pytest.mark.parametrize("sync", [one for one in STRATEGIES if one.get("strategy") != "async"], ids=str)
def test_round_whose_payloads_are_all_lost_is_trained_again_from_the_last_commit(sync: dict[str, Any]) -> None:
    fleet = fleet_of(0.1, 0.1, faults=after(4, lambda delta: LOST), update_rounds=4, sync=sync).run()
    error = fleet.error
    assert getattr(error, "code", None) == "NET012" and getattr(error, "exit_code", None) == 75
    assert LOST in str(error) and "diverged" not in str(error)
    rest = Fleet(fleet.job, [0.1, 0.1], slices_of(20, 64), past=past_of(fleet.persisted))
    done(rest)
    rest.persisted[:0] = fleet.persisted
    assert [one.round for one in rest.persisted] == [0, 1, 2, 3] and set(used(rest).values()) == {1}


def test_without_a_barrier_lost_payloads_are_trained_again_at_once() -> None:
    lost = after(4, lambda delta: LOST if delta.source.incarnation == 10_001 and delta.round in range(4, 9) else None)
    fleet = done(fleet_of(0.1, 0.1, faults=lost, update_rounds=6, sync={"strategy": "async"}))
    assert len(fleet.noted("reject")) >= 4 and not fleet.noted("exclude")


def test_round_of_a_lost_and_of_a_bad_payload_is_not_called_divergence() -> None:
    mixed = after(4, lambda delta: LOST if delta.source.worker else BAD)
    fleet = fleet_of(0.1, 0.1, faults=mixed, update_rounds=4).run()
    assert getattr(fleet.error, "code", None) == "NET012"


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_run_whose_every_delta_is_bad_has_diverged(sync: dict[str, Any]) -> None:
    fleet = fleet_of(0.1, 0.1, faults=after(4, lambda delta: BAD), update_rounds=8, sync=sync).run()
    error = fleet.error
    assert getattr(error, "code", None) == "TRN001" and BAD in str(error)


def test_replay_without_one_payload_is_trained_again() -> None:
    tables = {"run": {"name": "virtual", "mode": "replay"}, "update_rounds": 4, "samples": 120}
    calm = done(fleet_of(0.1, 0.2, **tables))
    fleet = fleet_of(0.1, 0.2, faults=faults(LOST, 2), **tables).run()
    assert getattr(fleet.error, "code", None) == "NET012"
    rest = done(Fleet(fleet.job, [0.1, 0.2], slices_of(20, 64), past=past_of(fleet.persisted)))
    assert [one.spans for one in fleet.persisted + rest.persisted] == [one.spans for one in calm.persisted]


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_every_accepted_delta_takes_a_strike_back(sync: dict[str, Any]) -> None:
    count = {0: 0, 1: 0, 2: 0}

    def every_third(delta: Delta) -> str | None:
        count[delta.source.worker] += 1
        return BAD if delta.source.worker == 1 and count[1] % 3 == 0 else None

    fleet = done(
        fleet_of(0.1, 0.1, 0.1, faults=Faults(reject=every_third), update_rounds=20, sync={**sync, "strikes": 2})
    )
    assert len(fleet.noted("reject")) >= 4 and not fleet.noted("exclude")


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_bad_deltas_in_a_row_exclude_their_worker(sync: dict[str, Any]) -> None:
    bad = after(6, lambda delta: BAD if delta.source.worker == 1 else None)
    fleet = done(fleet_of(0.1, 0.1, 0.1, faults=bad, update_rounds=12, sync={**sync, "strikes": 3}))
    assert [note["worker"] for note in fleet.noted("exclude")] == [1] and len(fleet.noted("reject")) == 3


def test_strikes_that_were_taken_back_are_not_carried_over() -> None:
    fleet = done(fleet_of(0.1, 0.1, faults=faults(BAD, 0, 1), update_rounds=4))
    assert [one.state["workers"]["1"].get("strikes", 0) for one in fleet.persisted] == [1, 2, 1, 0]


def dies_at(fleet: Fleet, number: int, *works: str, machine: str = "a") -> None:
    """Let each worker of a number die at its work: the first one at the first work, and so on."""
    deaths = count()

    def die() -> None:
        worker = fleet.workers[number]
        if worker.alive:
            fleet.tell(Alive(worker.source, works[next(deaths) % len(works)], False, machine))
            fleet.kill(number)

    def watch(command: c.Command) -> None:
        if isinstance(command, c.Assign) and command.worker == number and command.plan.spans:
            fleet.later(0.01, die)

    fleet.watchers.append(watch)


def test_work_that_ends_the_only_worker_three_times_ends_the_run() -> None:
    fleet = fleet_of(0.1)
    dies_at(fleet, 0, WORK)
    fleet.run()

    assert isinstance(fleet.error, ConfigError)
    assert (fleet.error.code, fleet.error.exit_code) == ("NET013", 2)
    assert WORK in str(fleet.error)
    assert len(fleet.noted("loss")) == 3


def test_work_that_ends_workers_on_two_machines_ends_the_run() -> None:
    fleet = fleet_of(0.1, 0.1, 0.1)
    for number, machine in enumerate("abc"):
        dies_at(fleet, number, WORK, machine=machine)
    fleet.run()

    assert fleet.error.code == "NET013" and WORK in str(fleet.error)
    assert len(fleet.noted("loss")) == 3


def test_a_bad_machine_alone_ends_no_run_and_is_told() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=12)
    dies_at(fleet, 1, WORK)
    done(fleet)

    losses = [note["worker"] for note in fleet.noted("loss")]
    assert losses.count(1) >= 4 and set(losses) == {1}
    told = [note["text"] for note in fleet.noted("problem") if "worker 1 was lost 3 times in a row at" in note["text"]]
    assert len(told) == 1


def test_workers_that_die_at_different_work_are_no_reason_to_end() -> None:
    fleet = fleet_of(0.1)
    dies_at(fleet, 0, *(f"samples {number}" for number in range(100)))
    fleet.run()

    assert fleet.error.code == "NET008"


def test_a_worker_that_gets_past_the_work_makes_it_forgotten() -> None:
    book = LossBook()
    for _ in range(2):
        book.add(WORK, 0, "a")
    book.contributed(0)
    book.add(WORK, 0, "a")
    assert not book.is_fatal(WORK, {0})
    book.add(WORK, 0, "a")
    book.add(WORK, 0, "a")
    assert book.is_fatal(WORK, {0}) and not book.is_fatal(WORK, {0, 1})


def test_a_worker_that_lives_and_hangs_at_its_work_is_counted() -> None:
    """It tells its work every second, and makes no progress."""
    fleet = fleet_of(0.1, worker={"stall_s": 5.0})

    def tell(source: object) -> None:
        worker = fleet.workers.get(0)
        if worker is not None and worker.source == source and not fleet.over:
            fleet.tell(Alive(worker.source, WORK, False, "a"))
            fleet.later(1.0, partial(tell, source))

    def watch(command: c.Command) -> None:
        if isinstance(command, c.Assign) and command.plan.spans:
            worker = fleet.workers[command.worker]
            worker.alive = False  # It says nothing of its own.
            fleet.later(0.01, partial(tell, worker.source))

    fleet.watchers.append(watch)
    fleet.run()

    assert fleet.error.code == "NET013" and WORK in str(fleet.error)
    assert [note["reason"] for note in fleet.noted("loss")] == [f"no progress for 5 s, at {WORK}"] * 3


@pytest.mark.parametrize(("limited", "lost"), [(False, True), (True, False)])
def test_work_with_a_limit_of_time_is_waited_for(limited: bool, lost: bool) -> None:
    fleet = fleet_of(0.1, 0.1, worker={"stall_s": 5.0})
    held: list[object] = []

    def tell(source: object, times: int) -> None:
        worker = fleet.workers.get(1)
        if worker is not None and worker.source == source and not fleet.over:
            if times == 0:
                worker.alive = True
                return
            fleet.tell(Alive(worker.source, WORK, limited, "a"))
            fleet.later(1.0, partial(tell, source, times - 1))

    def watch(command: c.Command) -> None:
        if not held and isinstance(command, c.Assign) and command.worker == 1 and command.plan.spans:
            held.append(command)
            fleet.workers[1].alive = False
            fleet.later(0.01, partial(tell, fleet.workers[1].source, 12))

    fleet.watchers.append(watch)
    fleet.run()

    early = [note for note in fleet.noted("loss") if note["monotonic_s"] < 12 and "no progress" in note["reason"]]
    assert bool(early) == lost


@pytest.mark.parametrize("batch_s", [(20.0,), (20.0, 30.0)])
def test_a_limit_shorter_than_every_workers_batch_ends_the_run(batch_s: tuple[float, ...]) -> None:
    fleet = fleet_of(*batch_s, worker={"stall_s": 5.0})
    fleet.run()

    assert (fleet.error.code, fleet.error.exit_code) == ("NET008", 2)
    assert fleet.error.got == "no progress for 5 s" and "worker.stall_s" in fleet.error.fix
    losses = [note["worker"] for note in fleet.noted("loss")]
    assert all(losses.count(number) >= 5 for number in range(len(batch_s)))


def test_a_limit_shorter_than_an_evaluation_ends_the_run_after_its_first_round() -> None:
    """Rounds end; what comes between them doesn't."""
    fleet = fleet_of(0.1, faults=Faults(evaluate_s=30.0), update_rounds=4, worker={"stall_s": 5.0})
    fleet.run()

    assert fleet.error.code == "NET008" and len(fleet.persisted) == 1


def test_one_worker_within_the_limit_keeps_the_run_going() -> None:
    fleet = fleet_of(0.1, 20.0, worker={"stall_s": 5.0})
    done(fleet)
    assert {note["worker"] for note in fleet.noted("loss")} <= {1}


def test_workers_that_all_fall_silent_again_and_again_end_the_run() -> None:
    fleet = fleet_of(0.1, 0.1)

    def watch(command: c.Command) -> None:
        if isinstance(command, c.Assign) and command.plan.spans:
            fleet.workers[command.worker].alive = False

    fleet.watchers.append(watch)
    fleet.run()

    assert (fleet.error.code, fleet.error.exit_code) == ("NET008", 75)
    assert "falls silent" in fleet.error.what and "worker.lease_s" in fleet.error.fix
    assert Counter(note["worker"] for note in fleet.noted("loss")) == {0: 5, 1: 5}
