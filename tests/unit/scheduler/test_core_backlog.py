"""A core that is behind: silence is judged by when words come, not by when they are read."""

from __future__ import annotations

from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.planner import CorrectionPace
from hypha_ray.types import Event
from tests.support.fleet import Fleet, job_of, rounds, slices_of

BACKLOG_S = 12.0


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
