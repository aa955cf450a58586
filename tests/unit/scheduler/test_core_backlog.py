"""Cores that are behind, by words that come or by a slow store: silence is no death, and nothing piles up."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.planner import CorrectionPace
from hypha_ray.types import Event
from tests.support.fleet import Faults, Fleet, done, fleet_of, job_of, rounds, slices_of

BACKLOG_S = 12.0
AHEAD = 4
STRATEGIES: list[dict[str, Any]] = [{"strategy": "diloco"}, {"strategy": "sync"}, {"strategy": "async"}]


class BusyFleet(Fleet):
    """Reads what worker 0 says between 3 and 15 s after that time, as if other words were in front of it."""

    stamps = True

    def tell(self, event: c.Input) -> None:
        if isinstance(event, Event) and event.source.worker == 0 and 3.0 <= self.now < 3.0 + BACKLOG_S:
            if self.stamps:
                self.core.arrived(event, self.now)
            self.later(3.0 + BACKLOG_S - self.now, lambda: super(BusyFleet, self).tell(event))
        else:
            super().tell(event)


def _busy(stamps: bool) -> Fleet:
    job = job_of(rounds=rounds(3, 2000), worker={"lease_s": 5.0})
    fleet = BusyFleet(job, [0.1, 0.1], slices_of(100, 64))
    fleet.stamps = stamps
    return fleet.run()


def test_worker_whose_words_wait_to_be_read_isnt_lost() -> None:
    fleet = _busy(stamps=True)
    assert fleet.error is None and fleet.noted("loss") == []


def test_worker_whose_words_come_late_is_lost() -> None:
    assert [(note["worker"], note["reason"]) for note in _busy(stamps=False).noted("loss")] == [(0, "silent for 5 s")]


def test_plans_of_a_small_fleet_are_corrected_at_once() -> None:
    pace = CorrectionPace(64)
    assert pace.allows(1.0) and pace.allows(1.0) and not pace.overdue


def test_plans_of_a_large_fleet_are_corrected_at_intervals_and_after_a_loss_at_once() -> None:
    pace = CorrectionPace(500)
    assert pace.allows(1.0)
    assert not pace.allows(1.4) and pace.overdue
    assert pace.allows(1.45, urgent=True) and not pace.overdue
    assert not pace.allows(1.9, urgent=True) and pace.overdue
    assert pace.allows(2.0)
    assert not pace.allows(2.1)
    pace.hurry()
    assert pace.allows(2.1)


def test_fleet_of_more_than_64_reaches_the_target_of_every_round_though_workers_die() -> None:
    """The last deltas close a round only once a correction that was put off is made."""
    speeds = [0.2 + 0.01 * (number % 40) for number in range(100)]
    fleet = Fleet(job_of(rounds=rounds(3, 8000)), list(speeds), slices_of(400, 64))
    for number in range(0, 100, 9):
        fleet.later(2.0 + number / 50, lambda number=number: fleet.kill(number))  # type: ignore[misc]
    fleet.run()
    assert fleet.error is None
    assert all(sum(span.samples for _, spans in one.spans for span in spans) >= 8000 for one in fleet.persisted)


def slow(*speeds: float, commit_s: float, update_rounds: int = 12, **tables: Any) -> Fleet:
    faults = Faults(commit_s=lambda round: commit_s)
    return done(fleet_of(*speeds, faults=faults, update_rounds=update_rounds, samples=40, **tables))


def problems(fleet: Fleet) -> list[str]:
    return [note["text"] for note in fleet.noted("problem")]


def begun(fleet: Fleet) -> dict[int, float]:
    """When each round was first planned."""
    times: dict[int, float] = {}
    for note in fleet.noted("plan"):
        times.setdefault(note["round"], note["monotonic_s"])
    return times


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_round_begins_once_all_but_the_last_four_are_committed(sync: dict[str, Any]) -> None:
    fleet = slow(0.05, 0.05, commit_s=3.0, sync=sync)
    committed = {round: at for at, round in fleet.commits}
    starts = begun(fleet)
    assert all(starts[number + AHEAD] >= at for number, at in committed.items() if number + AHEAD in starts)
    waiting = [
        sum(commit > at and number < round for number, commit in committed.items()) for round, at in starts.items()
    ]
    assert max(waiting) == AHEAD - 1, "training stops earlier than it has to"
    assert not fleet.noted("loss"), "a worker is given up that waits for the store"


def test_store_that_keeps_up_delays_nothing() -> None:
    quick, quicker = slow(0.1, 0.1, commit_s=0.5), slow(0.1, 0.1, commit_s=0.0)
    assert begun(quick) == begun(quicker) and not problems(quick)


def test_store_that_hangs_for_long_is_told_of_once() -> None:
    faults = Faults(commit_s=lambda round: 100.0 if round == 2 else 0.1)
    fleet = done(fleet_of(0.1, 0.1, faults=faults, update_rounds=8, samples=40))
    (text,) = problems(fleet)
    assert text == "training waits for the store, which is 4 rounds behind: is the disk slow?"
    assert not problems(slow(0.05, 0.05, commit_s=3.0)), "a slow one is nothing to worry about"
