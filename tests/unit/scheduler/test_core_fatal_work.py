"""Work that ends one worker after the other ends the run, with its name; a bad machine alone never does."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.failures import LossBook
from hypha_ray.types import Alive
from tests.support.fleet import Fleet, done, fleet_of

WORK = "reward function hangs:reward on the prompt '07='"


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
