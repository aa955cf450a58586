"""Workers die, hang and leave: what the scheduler's core makes of each, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from hypha_ray.errors import HyphaError
from hypha_ray.scheduler import messages as c
from hypha_ray.types import Delta, Report, Source
from tests.support.fleet import FIRST_ONLY, Faults, done, fleet_of, used

# ── loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lost_worker_is_replaced_in_mid_round_and_its_successor_trains_in_it() -> None:
    fleet = fleet_of(0.1, 0.1)
    fleet.later(3.0, lambda: fleet.kill(1))
    done(fleet)
    assert fleet.reduces[0].sources[1].incarnation == 10_002
    first = fleet.of_kind("round")[0]
    assert 0 < first["batches"][1] < first["batches"][0]
    assert first["samples"] == 400


def test_hung_worker_loses_its_lease_and_what_it_says_later_is_dropped() -> None:
    fleet = fleet_of(0.1, 0.1)
    fleet.later(2.0, lambda: fleet.hang(1))
    old = Source("virtual", 1, 10_001)
    fleet.later(12.0, lambda: fleet.tell(Report(old, 0, 50, 200, 200, 200, 1.0, 1.0, 50, 0.0, 1e-3)))
    fleet.later(12.0, lambda: fleet.tell(Delta(old, 0, (), 200, 200, 200, 50, 1.0, 1, 8, 1.0, 0.0)))
    done(fleet)
    dismissed = [at for at, command in fleet.commanded(c.Dismiss) if command.worker == 1]
    assert len(dismissed) == 1 and 2.0 < dismissed[0] <= 2.0 + 1.0 + 5.0 + 1.0
    assert [note["incarnation"] for note in fleet.noted("stale")] == [10_001, 10_001]
    assert all(source.incarnation == 10_002 for reduce in fleet.reduces for source in reduce.sources if source.worker)


def test_two_losses_at_the_same_time_are_both_made_good() -> None:
    fleet = fleet_of(0.1, 0.1, 0.1, samples=600)
    fleet.later(3.0, lambda: fleet.hang(1))
    fleet.later(3.0, lambda: fleet.hang(2))
    done(fleet)
    assert {note["worker"] for note in fleet.noted("loss")} == {1, 2}
    assert [record["samples"] for record in fleet.of_kind("round")] == [600] * 3


def test_all_workers_with_samples_lost_leave_their_work_to_idle_ones() -> None:
    fleet = fleet_of(0.1, 0.1, faults=FIRST_ONLY, update_rounds=2, samples=4)
    fleet.on(c.Assign, lambda: fleet.kill(0), when=lambda command: bool(command.plan.spans))
    done(fleet)
    assert [source.worker for source in fleet.reduces[0].sources] == [1]


def test_loss_while_the_server_reduces_keeps_the_delta_and_begins_with_the_others() -> None:
    fleet = fleet_of(0.1, 0.1, faults=FIRST_ONLY)
    fleet.on(c.Reduce, lambda: fleet.kill(1))
    done(fleet)
    assert [[one.worker for one in persist.verdict.accepted] for persist in fleet.persisted] == [[0, 1], [0], [0]]


def test_loss_while_the_result_is_merged_doesnt_keep_the_record_back() -> None:
    fleet = fleet_of(0.1, 0.1, faults=FIRST_ONLY)
    fleet.on(c.Merge, lambda: fleet.kill(1), 0.001, lambda command: command.version == 1 and command.worker == 1)
    done(fleet)
    assert [record["round"] for record in fleet.of_kind("round")] == [0, 1, 2]


# ── evaluation ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("round", [1, 3])
def test_lost_share_of_an_evaluation_is_evaluated_by_the_successor(round: int) -> None:
    fleet = fleet_of(0.1, 0.1, faults=Faults(evaluate_s=1.0))
    fleet.on(c.Merge, lambda: fleet.kill(1), 0.5, lambda command: command.version == round and command.worker == 1)
    done(fleet)
    assert [(record["round"], record["count"]) for record in fleet.of_kind("eval")] == [(0, 128), (1, 128), (2, 128)]


@pytest.mark.parametrize("workers", [1, 2])
def test_last_evaluation_that_nobody_comes_for_is_left_out_after_the_start_deadline(workers: int) -> None:
    faults = replace(FIRST_ONLY, evaluate_s=1.0)
    fleet = fleet_of(*[0.1] * workers, faults=faults, resources={"num_workers": workers, "start_deadline_s": 30.0})
    lose = workers - 1
    fleet.on(c.Merge, lambda: fleet.kill(lose), 0.5, lambda one: one.version == 3 and one.worker == lose)
    done(fleet)
    assert [record["round"] for record in fleet.of_kind("eval")] == [0, 1]
    lost_at = fleet.noted("loss")[0]["monotonic_s"]
    assert lost_at + 30.0 <= fleet.now <= lost_at + 32.0


def test_all_lost_after_the_last_commit_still_end_the_run_well() -> None:
    fleet = fleet_of(0.1, faults=FIRST_ONLY, update_rounds=1)
    fleet.on(c.Reduce, lambda: fleet.kill(0))
    done(fleet)
    assert len(fleet.persisted) == 1 and fleet.of_kind("eval") == []


def test_worker_that_lives_and_never_evaluates_is_replaced_after_the_stall_time() -> None:
    fleet = fleet_of(0.1, 0.1, faults=Faults(evaluate_s=0.5), worker={"stall_s": 20.0})

    def stick() -> None:  # It goes on to say that it is alive.
        fleet.faults.evaluate_s = 1e9

    def heal() -> None:
        fleet.faults.evaluate_s = 0.5

    fleet.on(c.Reduce, stick, when=lambda command: command.round == 2)
    fleet.on(c.Dismiss, heal)
    done(fleet)
    assert all(note["reason"] == "no progress for 20 s" for note in fleet.noted("loss")) and fleet.noted("loss")
    assert [record["round"] for record in fleet.of_kind("eval")] == [0, 1, 2]


# ── leaving ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_preempted_worker_hands_over_a_part_that_counts_by_its_samples() -> None:
    fleet = fleet_of(0.1, 0.1, faults=FIRST_ONLY)
    fleet.later(2.05, lambda: fleet.preempt(1))
    done(fleet)
    first = fleet.reduces[0]
    assert [source.worker for source in first.sources] == [0, 1]
    assert 0 < first.weights[1] < 100 and sum(first.weights) == 400
    assert [note["worker"] for note in fleet.noted("leave")] == [1]
    assert all(note["reason"] == "no room" for note in fleet.noted("loss"))


def test_draining_worker_is_asked_to_leave_and_replaced() -> None:
    fleet = fleet_of(0.1, 0.1)
    fleet.later(2.0, lambda: fleet.tell(c.Draining((1,), "maintenance")))
    done(fleet)
    assert [(command.worker, command.reason) for _, command in fleet.commanded(c.Drain)] == [(1, "maintenance")]
    assert [note["incarnation"] for note in fleet.noted("join")] == [10_001, 10_001, 10_002]


def test_preempted_worker_between_two_rounds_leaves_without_a_delta() -> None:
    fleet = fleet_of(0.1, 0.1)
    fleet.on(c.Reduce, lambda: fleet.preempt(1))
    done(fleet)
    assert len(fleet.noted("leave")) == 1
    assert [record["samples"] for record in fleet.of_kind("round")] == [400] * 3


# ── every worker breaks down ──────────────────────────────────────────────────────────────────────────────────────


def broken_by(*exceptions: str | None) -> HyphaError:
    """What ends a run whose workers all break down at work, by these exceptions in turn."""
    fleet, turn = fleet_of(0.1, 0.1), cycle(exceptions)

    def break_down(worker: int) -> None:
        if worker in fleet.workers:
            fleet.tell(c.Lost(fleet.workers[worker].source, "it broke", next(turn)))

    def spy(command: c.Command) -> None:
        if isinstance(command, c.Assign):
            fleet.later(0.2, lambda: break_down(command.worker))

    fleet.watchers.append(spy)
    fleet.run()
    assert isinstance(fleet.error, HyphaError)
    return fleet.error


@pytest.mark.parametrize(
    "exceptions",
    [
        ("ValueError: no padding token",),
        ("IndexError: index 7 is out of bounds for 4", "IndexError: index 12 is out of bounds for 4"),
        ("RuntimeError: at 0x7f3a", "RuntimeError: at 0x99"),
    ],
)
def test_one_exception_that_breaks_every_worker_is_no_reason_to_try_again(exceptions: tuple[str, ...]) -> None:
    error = broken_by(*exceptions)
    assert (error.code, error.exit_code) == ("NET008", 2)
    assert error.got in exceptions


@pytest.mark.parametrize(
    "exceptions",
    [(None,), ("ValueError: a", "ValueError: b"), ("ValueError: a", None), ("ValueError: a", "OSError: a")],
)
def test_workers_that_die_or_break_by_different_exceptions_may_be_tried_again(
    exceptions: tuple[str | None, ...],
) -> None:
    error = broken_by(*exceptions)
    assert (error.code, error.exit_code) == ("NET008", 75)


def test_round_that_all_workers_leave_says_what_it_lacks_and_the_next_ones_make_it_up() -> None:
    fleet = fleet_of(1.0, 1.0, update_rounds=4, samples=400)
    fleet.later(2.05, lambda: [fleet.preempt(0), fleet.preempt(1)])
    fleet.run()
    samples = [sum(one.samples for one in persist.verdict.accepted) for persist in fleet.persisted]
    assert samples[0] < 100, "two seconds of work"
    assert 1600 <= sum(samples) < 1600 + 4 * 8, "four rounds, each rounded up to whole batches"
    assert max(samples) <= 2 * 400 + 8
    (problem,) = fleet.noted("problem")
    assert problem["text"] == f"round 1 has {samples[0]} of its 400 samples: the next ones make them up"
    assert set(used(fleet).values()) == {1}
