"""Waiting for workers and giving up, a clock that jumps, and workers that can't be trusted, on a virtual clock."""

from __future__ import annotations

import pytest

from hypha_ray.errors import CapacityError
from hypha_ray.scheduler import messages as c
from hypha_ray.types import Delta, Source
from tests.support.fleet import FIRST_ONLY, Faults, done, fleet_of

# ── back-off, waiting and giving up ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_flapping_worker_is_tried_ever_more_rarely_until_it_contributes() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=60)
    fleet.faults.room = lambda source: source.worker == 0 or not 10_001 < source.incarnation < 10_010
    fleet.later(2.0, lambda: fleet.kill(1))
    done(fleet)
    hires = [at for at, command in fleet.commanded(c.Hire) if command.source.worker == 1]
    waits = [hire - note["monotonic_s"] for note, hire in zip(fleet.noted("loss"), hires[1:], strict=True)]
    assert all(due <= waited <= due + 1 for due, waited in zip((0, 1, 2, 4, 8, 16, 32, 60, 60), waits, strict=True))


def test_contribution_ends_the_back_off() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=8)
    fleet.on(c.Reduce, lambda: fleet.kill(1), when=lambda command: command.round == 1)
    fleet.on(c.Reduce, lambda: fleet.kill(1), when=lambda command: command.round == 3)
    fleet.on(c.Reduce, lambda: fleet.kill(1), when=lambda command: command.round == 5)
    done(fleet)
    losses = [note["monotonic_s"] for note in fleet.noted("loss")]
    hires = [at for at, command in fleet.commanded(c.Hire) if command.source.worker == 1]
    assert len(losses) == 3 and hires[1:] == losses


def test_slot_without_room_for_days_is_still_tried() -> None:
    fleet = fleet_of(0.1, 0.1)
    slot = fleet.core.view().roster.slots[1]
    slot.failures = 5000
    fleet.later(2.0, lambda: fleet.kill(1))
    done(fleet)
    assert slot.retry_at == pytest.approx(fleet.noted("loss")[0]["monotonic_s"] + 60.0)


def test_run_without_workers_waits_and_goes_on_when_they_come() -> None:
    fleet = fleet_of(0.1, 0.1, resources={"num_workers": 2, "max_idle_s": 100.0})
    fleet.faults.room = lambda source: source.incarnation == 10_001 or fleet.now > 60.0
    fleet.later(2.0, lambda: fleet.kill(0))
    fleet.later(2.0, lambda: fleet.kill(1))
    done(fleet)
    assert fleet.now > 60.0 and len(fleet.noted("waiting")) == 1


def test_run_without_workers_gives_up_after_the_longest_wait() -> None:
    fleet = fleet_of(0.1, faults=FIRST_ONLY, resources={"num_workers": 1, "max_idle_s": 50.0})
    fleet.later(2.0, lambda: fleet.kill(0))
    fleet.run()
    assert isinstance(fleet.error, CapacityError)
    assert fleet.error.exit_code == 75
    assert 52.0 <= fleet.now <= 53.0


def test_workers_that_waited_long_for_others_arent_taken_for_stuck() -> None:
    resources = {"num_workers": 2, "min_workers": 2, "max_idle_s": 100.0}
    fleet = fleet_of(0.1, 0.1, resources=resources, worker={"stall_s": 10.0})
    fleet.faults.room = lambda source: source.incarnation == 10_001 or fleet.now > 50.0
    fleet.on(c.Reduce, lambda: fleet.kill(1))
    done(fleet)
    assert all(note["worker"] == 1 for note in fleet.noted("loss"))


# ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", [3.0, 61.0, 86_400.0])
def test_stopped_scheduler_evicts_nobody(seconds: float) -> None:
    fleet = fleet_of(0.1, 0.1)
    fleet.later(2.5, lambda: fleet.stop(seconds))
    done(fleet)
    assert not fleet.noted("loss")


def test_stopped_scheduler_doesnt_count_its_absence_as_grace_time() -> None:
    fleet = fleet_of(0.1, 0.11, update_rounds=1, sync={"quorum": 1, "grace_s": 2.0})
    fleet.later(5.25, lambda: fleet.stop(60.0))
    done(fleet)
    assert len(fleet.reduces[0].sources) == 2


def test_stopped_scheduler_that_waits_for_machines_doesnt_give_up() -> None:
    fleet = fleet_of(0.1, resources={"num_workers": 1, "max_idle_s": 50.0})
    fleet.faults.room = lambda source: source.incarnation == 10_001 or fleet.now > 220.0
    fleet.later(2.0, lambda: fleet.kill(0))
    fleet.later(20.0, lambda: fleet.stop(200.0))
    done(fleet)


def test_quorum_with_a_hung_worker_goes_on_after_the_grace_time() -> None:
    fleet = fleet_of(0.1, 0.1, 0.1, samples=600, sync={"quorum": 2, "grace_s": 1.0}, faults=FIRST_ONLY)
    fleet.later(4.9, lambda: fleet.hang(2))
    done(fleet)
    assert [source.worker for source in fleet.reduces[0].sources] == [0, 1]
    assert fleet.commanded(c.Reduce)[0][0] < 8.0


# ── trust ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_strikes_exclude_a_worker_and_too_few_slots_end_the_run() -> None:
    def poisoned(delta: Delta) -> str | None:
        return "non-finite values" if delta.source.worker == 1 else None

    faults = Faults(reject=poisoned)
    fleet = fleet_of(0.1, 0.1, faults=faults, update_rounds=6, sync={"strikes": 2})
    done(fleet)
    assert [record["rejected"] for record in fleet.of_kind("round")] == [1, 1, 0, 0, 0, 0]
    assert sum(command.source.worker == 1 for _, command in fleet.commanded(c.Hire)) == 1
    both = {"num_workers": 2, "min_workers": 2}
    fleet = fleet_of(0.1, 0.1, faults=faults, update_rounds=6, sync={"strikes": 2}, resources=both)
    fleet.run()
    assert isinstance(fleet.error, CapacityError)


def test_excluded_number_without_a_worker_is_not_hired_for() -> None:
    def poisoned(delta: Delta) -> str | None:
        return "non-finite values" if delta.source.worker == 1 else None

    fleet = fleet_of(0.1, 0.1, faults=Faults(reject=poisoned), sync={"strikes": 1})
    fleet.faults.room = lambda source: source.incarnation == 10_001
    fleet.on(c.Reduce, lambda: fleet.kill(1))
    done(fleet)
    reduced = fleet.noted("exclude")[0]["monotonic_s"]
    assert all(at <= reduced for at, command in fleet.commanded(c.Hire) if command.source.worker == 1)


def test_worker_with_another_model_is_excluded() -> None:
    faults = Faults(layout=lambda source: "other" if source.worker == 1 and source.incarnation > 10_001 else "layout")
    fleet = fleet_of(0.1, 0.1, faults=faults)
    fleet.later(2.0, lambda: fleet.kill(1))
    done(fleet)
    assert "builds another model" in fleet.noted("loss")[1]["reason"]
    assert sum(command.source.worker == 1 for _, command in fleet.commanded(c.Hire)) == 2


def test_exclusion_outlasts_a_strike_for_what_a_predecessor_handed_over() -> None:
    faults = Faults(
        reject=lambda delta: "non-finite values" if delta.source == Source("virtual", 1, 10_001) else None,
        layout=lambda source: "other" if source == Source("virtual", 1, 10_002) else "layout",
    )
    fleet = fleet_of(0.5, 0.01, faults=faults, update_rounds=4, samples=40)
    fleet.later(1.5, lambda: fleet.kill(1))  # It has handed over by then.
    done(fleet)
    assert fleet.of_kind("round")[0]["rejected"] == 1
    assert sum(command.source.worker == 1 for _, command in fleet.commanded(c.Hire)) == 2


@pytest.mark.parametrize("killed_at_s", [2.0, 10.5])
def test_joiner_with_wrong_weights_is_dismissed_whichever_is_known_first(killed_at_s: float) -> None:
    # Round 0 lasts 5 s; what it began with is known from the start, what it ended with half a second after it.
    faults = Faults(proof=lambda source, right: "wrong" if source.incarnation == 10_002 else right)
    fleet = fleet_of(0.1, 0.1, faults=faults)
    fleet.on(c.Reduce, lambda: fleet.kill(1), when=lambda command: killed_at_s > 10)
    fleet.later(killed_at_s, lambda: fleet.kill(1)) if killed_at_s < 10 else None
    done(fleet)
    assert [note["reason"][:8] for note in fleet.noted("loss")] == ["killed", "it began"]
    wrong = Source("virtual", 1, 10_002)
    assert all(wrong not in reduce.sources for reduce in fleet.reduces)


def test_delta_of_a_joiner_found_wrong_before_the_round_closes_is_left_out() -> None:
    faults = Faults(proof=lambda source, right: "wrong" if source.incarnation == 10_002 else right)
    fleet = fleet_of(1.0, 0.01, faults=faults, samples=12)
    fleet.on(c.Reduce, lambda: fleet.kill(1))
    done(fleet)
    wrong = Source("virtual", 1, 10_002)
    delivered = [note for note in fleet.noted("loss") if note["incarnation"] == 10_002]
    assert delivered and all(wrong not in reduce.sources for reduce in fleet.reduces)


def test_round_that_one_of_two_wrong_joiners_closes_is_without_the_other_one() -> None:
    faults = Faults(proof=lambda source, right: "wrong" if source.incarnation == 10_002 else right)
    fleet = fleet_of(1.0, 0.01, faults=faults, samples=12)
    fleet.on(c.Reduce, lambda: (fleet.kill(0), fleet.kill(1)))
    done(fleet)
    assert sum(note["reason"].startswith("it began") for note in fleet.noted("loss")) == 2
    assert all(source.incarnation != 10_002 for reduce in fleet.reduces for source in reduce.sources)
