"""The roster: slots, leases, back-off, exclusion, and what of it outlives a scheduler."""

from __future__ import annotations

import json

import pytest

from hypha_ray.scheduler.roster import LostWorker, Roster
from hypha_ray.types import Source
from hypha_ray.types.rounds import STARTS_PER_ATTEMPT
from tests.support.fleet import job_of


def roster_of(workers: int = 2, attempt: int = 1, **tables: object) -> Roster:
    return Roster(job_of(resources={"num_workers": workers}, **tables), "run", attempt)  # type: ignore[arg-type]


def at_work(roster: Roster, now: float = 0.0) -> list[Source]:
    """Fill all slots."""
    roster.open(range(len(roster.slots)), now)
    hired = roster.hire(now)
    assert all(roster.ready(source, now) is not None for source in hired)
    return hired


def test_hire_fills_each_open_slot_once() -> None:
    roster = roster_of(3)
    roster.open(range(2), 0.0)
    assert [source.worker for source in roster.hire(0.0)] == [0, 1]
    assert roster.hire(0.5) == [] and [source.worker for source in roster.hire(1.0)] == [2]
    assert len(roster.starting) == 3 and roster.assignable == []


def test_incarnations_of_a_later_attempt_are_greater() -> None:
    first, second = roster_of(1), roster_of(1, attempt=2)
    for _ in range(50):
        first.open(range(1), 0.0)
        (source,) = first.hire(0.0)
        first.release(source, 0.0)
    assert source.incarnation == STARTS_PER_ATTEMPT + 50 < at_work(second)[0].incarnation


def test_ready_from_nobody_or_twice_changes_nothing() -> None:
    roster = roster_of(1)
    (source,) = at_work(roster)
    assert roster.ready(source, 1.0) is None
    assert roster.ready(Source("run", 0, source.incarnation + 1), 1.0) is None
    assert roster.ready(Source("run", 7, source.incarnation), 1.0) is None
    assert len(roster.members) == 1


def test_word_renews_the_lease_and_silence_ends_it() -> None:
    roster = roster_of(1)
    (source,) = at_work(roster)
    assert roster.renew_lease(source, 4.9, progress=False) and roster.silent(9.8, ()) == []
    assert roster.silent(9.9, ()) == [LostWorker(source, "silent for 5 s", "silent for 5 s", is_silent=True)]
    assert not roster.renew_lease(source, 9.95, progress=True)


def test_busy_worker_without_progress_is_given_up_and_an_idle_one_is_not() -> None:
    roster = roster_of(2, worker={"stall_s": 20.0})
    busy, idle = at_work(roster)
    for second in range(1, 22):
        given_up = roster.silent(second, {0})
        assert roster.renew_lease(busy, second, progress=False) and roster.renew_lease(idle, second, progress=False)
    assert given_up == [LostWorker(busy, "no progress for 20 s", "no progress for 20 s")]
    assert roster.silent(22.0, {1}) == []


def test_absence_of_the_scheduler_counts_for_nobody() -> None:
    roster = roster_of(1, worker={"stall_s": 20.0})
    (source,) = at_work(roster)
    roster.defer(3600.0)
    assert roster.silent(3604.9, {0}) == [] and roster.renew_lease(source, 3604.9, progress=True)


def test_vacated_slot_has_no_lease_and_its_worker_no_voice() -> None:
    roster = roster_of(1)
    (source,) = at_work(roster)
    assert roster.release(source, 1.0) and not roster.release(source, 1.0)
    assert not roster.renew_lease(source, 1.0, progress=True) and roster.members == [] and not roster.book.leases


def test_back_off_doubles_to_a_minute_and_ends_with_a_contribution() -> None:
    roster, now, waits = roster_of(1), 0.0, []
    at_work(roster)
    for _ in range(10):
        source = roster.slots[0].source
        assert source is not None and roster.release(source, now)
        waits.append((roster.slots[0].retry_at or 0.0) - now)
        now += waits[-1]
        assert len(roster.hire(now)) == 1
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    roster.contributed(0)
    source = roster.slots[0].source
    assert source is not None and roster.release(source, now) and len(roster.hire(now)) == 1


def test_worker_that_leaves_is_replaced_at_once_and_gets_no_more_work() -> None:
    roster = roster_of(2)
    leaver, other = at_work(roster)
    assert roster.leave(leaver) and not roster.leave(leaver)
    assert [member.source for member in roster.assignable] == [other] and len(roster.members) == 2
    assert roster.release(leaver, 3.0, blame=False) and [one.worker for one in roster.hire(3.0)] == [0]


def test_successor_inherits_the_batch_time_and_nothing_that_was_sent() -> None:
    roster = roster_of(1)
    (source,) = at_work(roster)
    (member,) = roster.members
    member.batch_time.observe(0.7)
    member.cache_slice(3, 10, 100)
    roster.release(source, 1.0)
    (successor,) = roster.hire(1.0)
    heir = roster.ready(successor, 2.0)
    assert heir is not None and heir.batch_time.mean == 0.7 and heir.cached_slices == {} and heir.untrained


def test_last_strike_excludes_for_good_across_attempts() -> None:
    roster = roster_of(2, sync={"strikes": 2})
    at_work(roster)
    assert not roster.strike(1) and roster.strike(1) and roster.eligible == 1
    later = roster_of(2, attempt=2, sync={"strikes": 2})
    later.restore(json.loads(json.dumps(roster.state())))
    assert [source.worker for source in at_work(later)] == [0] and later.eligible == 1


@pytest.mark.parametrize("number", ["0", "9"])
def test_restored_state_of_a_slot_that_is_gone_is_passed_over(number: str) -> None:
    roster = roster_of(1, attempt=2)
    roster.restore({number: {"batch_s": 0.25, "strikes": 1.0}})
    (source,) = at_work(roster)
    member = roster.member(source)
    assert member is not None and member.batch_time.mean == (0.25 if number == "0" else None)


def test_worker_that_did_its_final_plan_may_fall_silent_and_is_not_replaced() -> None:
    roster = roster_of(1)
    (source,) = at_work(roster)
    roster.done(0)
    assert roster.silent(1000.0, {0}) == []
    roster.release(source, 1000.0)
    assert roster.hire(2000.0) == []


def test_fleet_in_which_every_slot_breaks_down_again_and_again_is_hopeless() -> None:
    roster = roster_of(2)
    assert not any(roster.broke_down(0) for _ in range(20))
    assert [roster.broke_down(1) for _ in range(5)] == [False] * 4 + [True]
    roster.contributed(0)
    assert not roster.broke_down(1)
