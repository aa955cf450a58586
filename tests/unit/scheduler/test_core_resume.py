"""A scheduler that goes on from the commit log, and replay mode: the same samples whatever dies."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.types import Delta, Source
from tests.support.fleet import Faults, Fleet, done, fleet_of, job_of, past_of, rounds, slices_of, used


def replaying(*speeds: float, update_rounds: int = 5) -> Fleet:
    job = job_of(rounds=rounds(update_rounds, 120), run={"name": "virtual", "mode": "replay"})
    return Fleet(job, list(speeds), slices_of(6, 50))


def spans(fleet: Fleet) -> list[object]:
    return [(persist.round, persist.spans, persist.cursors, persist.epoch) for persist in fleet.persisted]


# ── replay ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("killed_at_s", [0.3, 1.0, 2.0, 2.13, 2.17, 3.0, 9.0])
def test_replay_with_a_loss_persists_what_the_calm_run_does(killed_at_s: float) -> None:
    calm = done(replaying(0.1, 0.2))
    fleet = replaying(0.1, 0.2)
    for worker in (0, 1):
        fleet.later(killed_at_s, lambda worker=worker: fleet.kill(worker))  # type: ignore[misc]
    fleet.later(6.0, lambda: fleet.hang(1))
    done(fleet)
    assert spans(fleet) == spans(calm)
    assert fleet.noted("loss") and not fleet.noted("correction")


def test_successor_in_replay_has_the_very_plan_and_the_inner_state_of_its_predecessor() -> None:
    fleet = replaying(0.1, 0.2)
    fleet.on(c.Merge, lambda: fleet.kill(1), 1.0, lambda command: command.version == 2)
    done(fleet)
    plans = [(at, one.plan) for at, one in fleet.commanded(c.Assign) if one.worker == 1 and one.plan.round == 2]
    assert plans[0][1].spans == plans[1][1].spans and not plans[0][1].restores and plans[1][1].restores
    assert [(at, one.worker) for at, one in fleet.commanded(c.RestoreInnerState)] == [(plans[1][0], 1)]


def test_successor_in_the_first_round_of_replay_has_nothing_to_restore() -> None:
    fleet = replaying(0.1, 0.2)
    fleet.later(1.0, lambda: fleet.kill(1))
    done(fleet)
    assert not fleet.commanded(c.RestoreInnerState)


def test_successor_of_a_worker_that_had_handed_over_restores_in_the_next_round() -> None:
    fleet = replaying(0.1, 0.4)
    fleet.later(4.0, lambda: fleet.kill(0))  # It had done its share by 1.6 s.
    done(fleet)
    assert fleet.reduces[0].sources[0].incarnation == 10_001
    restored = [one.plan for _, one in fleet.commanded(c.Assign) if one.plan.restores]
    assert [(plan.round, len(plan.spans) > 0) for plan in restored] == [(1, True)]
    assert [one.worker for _, one in fleet.commanded(c.RestoreInnerState)] == [0]


def test_preempted_worker_in_replay_hands_nothing_over_and_its_successor_does_all() -> None:
    calm = done(replaying(0.1, 0.2))
    fleet = replaying(0.1, 0.2)
    fleet.later(1.0, lambda: fleet.preempt(0))
    done(fleet)
    assert spans(fleet) == spans(calm)
    assert fleet.reduces[0].sources[0].incarnation == 10_002


def test_replay_waits_for_all_its_workers_before_a_round() -> None:
    calm = done(replaying(0.1, 0.2))
    fleet = replaying(0.1, 0.2)
    fleet.faults.room = lambda source: source.incarnation == 10_001 or fleet.now > 40.0
    fleet.on(c.Reduce, lambda: fleet.kill(1))
    done(fleet)
    assert spans(fleet) == spans(calm) and fleet.now > 40.0


# ── resume ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", ["elastic", "replay"])
@pytest.mark.parametrize("stopped_after", [1, 2, 4])
def test_run_that_goes_on_from_any_commit_uses_every_sample_once(mode: str, stopped_after: int) -> None:
    job = job_of(rounds=rounds(5, 120), run={"name": "virtual", "mode": mode})
    whole = done(Fleet(job, [0.1, 0.2], slices_of(4, 50)))
    log = whole.persisted[:stopped_after]
    rest = Fleet(job, [0.1, 0.2], slices_of(4, 50), past=past_of(log)).run()
    assert [persist.round for persist in rest.persisted] == list(range(stopped_after, 5))
    totals = [persist.state["totals"] for persist in rest.persisted]
    assert totals[-1]["samples_total"] == 600 and totals[0]["elapsed_s"] > log[-1].state["totals"]["elapsed_s"]
    if mode == "replay":
        assert spans(rest) == spans(whole)[stopped_after:]
        assert {one.worker for _, one in rest.commanded(c.RestoreInnerState)} == {0, 1}
    rest.persisted[:0] = log
    counts = used(rest)
    assert set(counts.values()) == {1} and counts.total() == 600
    assert all(counts[epoch, index, n] for epoch in range(3) for index in range(4) for n in range(50))


def test_excluded_worker_stays_excluded_after_a_resume() -> None:
    def poisoned(delta: Delta) -> str | None:
        return "non-finite values" if delta.source.worker == 1 else None

    tables: dict[str, Any] = {"sync": {"strikes": 2}}
    first = done(fleet_of(0.1, 0.1, faults=Faults(reject=poisoned), **tables))
    assert first.persisted[1].state["workers"]["1"]["strikes"] == 2
    job = fleet_of(0.1, 0.1, **tables).job
    rest = Fleet(job, [0.1, 0.1], slices_of(20, 64), past=past_of(first.persisted[:2])).run()
    assert {command.source.worker for _, command in rest.commanded(c.Hire)} == {0}


def test_strikes_are_carried_over_to_the_next_scheduler() -> None:
    def poisoned(delta: Delta) -> str | None:
        return "non-finite values" if delta.source.worker == 1 and delta.round in (0, 1) else None

    tables: dict[str, Any] = {"sync": {"strikes": 2}, "update_rounds": 4}
    first = done(fleet_of(0.1, 0.1, faults=Faults(reject=poisoned), **tables))
    rest = Fleet(
        first.job, [0.1, 0.1], slices_of(20, 64), faults=Faults(reject=poisoned), past=past_of(first.persisted[:1])
    ).run()
    assert [(note["worker"], note["strikes"]) for note in rest.noted("exclude")] == [(1, 2)]


def test_word_of_the_attempt_before_is_stale() -> None:
    first = done(fleet_of(0.1, 0.1))
    rest = Fleet(first.job, [0.1, 0.1], slices_of(20, 64), past=past_of(first.persisted[:1]))
    rest.later(1.0, lambda: rest.tell(Delta(Source("virtual", 0, 10_001), 1, (), 4, 4, 4, 1, 1.0, 1, 8, 1.0, 0.0)))
    done(rest)
    assert [note["incarnation"] for note in rest.noted("stale")] == [10_001]
    assert all(source.incarnation > 20_000 for reduce in rest.reduces for source in reduce.sources)


def test_resume_after_the_last_commit_only_evaluates() -> None:
    first = done(fleet_of(0.1, 0.1))
    rest = Fleet(first.job, [0.1, 0.1], slices_of(20, 64), past=past_of(first.persisted)).run()
    assert rest.error is None and not rest.persisted
    assert [record["round"] for record in rest.of_kind("eval")] == [2]


@pytest.mark.parametrize(("others", "code"), [({0, 1}, "CKPT005"), ({1}, "CAP002")])
def test_run_whose_workers_build_another_model_than_its_checkpoints_have_ends_and_says_so(
    others: set[int], code: str
) -> None:
    job = job_of(rounds=rounds(4, 120), run={"name": "virtual"}, resources={"min_workers": 2})
    begun = done(Fleet(job, [0.1, 0.1], slices_of(6, 50)))
    faults = Faults(layout=lambda source: "other" if source.worker in others else "layout")
    rest = Fleet(job, [0.1, 0.1], slices_of(6, 50), faults=faults, past=past_of(begun.persisted[:2])).run()
    assert code in str(rest.error) and not rest.persisted
