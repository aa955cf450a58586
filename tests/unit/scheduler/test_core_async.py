"""Asynchronous jobs as the scheduler's core plans them, on a virtual clock."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from hypha_ray.scheduler import messages as c
from hypha_ray.types import Delta, RoundProgress, Source
from tests.support.fleet import FIRST_ONLY, Faults, Fleet, done, fleet_of, past_of, slices_of, used

ASYNC = {"strategy": "async", "arrival_grace_s": 0.0}
GATHERING = {"strategy": "async"}
"""Deltas wait for one another as long as the job says nothing else."""
PAPER = (0.58, 0.75, 1.51, 3.33)
"""Seconds a step of the workers in the paper's toy example."""


def arrivals(fleet: Fleet) -> list[tuple[int, int]]:
    """Worker and staleness of each delta, as it was merged."""
    return [(note["worker"], note["staleness"]) for note in fleet.noted("arrival")]


# ── a period ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_round_is_as_many_deltas_as_there_are_workers_whoever_they_are_of() -> None:
    fleet = done(fleet_of(0.1, 0.5, update_rounds=4, sync={**ASYNC, "dynamic_local_steps": False}))
    rounds = [[one.worker for one in persist.verdict.accepted] for persist in fleet.persisted]
    assert rounds == [[0, 0], [0, 0], [1, 0], [0, 0]]
    assert all(record["samples"] == 400 and record["arrivals"] == 2 for record in fleet.of_kind("round"))
    assert fleet.persisted[0].spans[0][0] == 0 and sum(s.samples for s in fleet.persisted[0].spans[0][1]) == 400


def test_period_says_how_many_deltas_make_a_round() -> None:
    fleet = done(fleet_of(0.1, 0.1, sync={**ASYNC, "period": 5}))
    assert [record["arrivals"] for record in fleet.of_kind("round")] == [5, 5, 5]
    assert all(380 <= record["samples"] <= 420 for record in fleet.of_kind("round"))


def test_each_reduction_says_how_far_its_round_has_come() -> None:
    """With it come the norms of two rounds' merged deltas, against which a server holds new ones."""
    faults = Faults(
        norm=lambda delta: 10.0 * delta.round + delta.source.worker,
        reject=lambda delta: "too long" if (delta.source.worker, delta.round) in ((1, 1), (2, 4)) else None,
    )
    fleet = done(fleet_of(0.1, 0.13, 0.17, update_rounds=5, sync=ASYNC, faults=faults))
    number, count, weight, norms = 0, 0, 0, list[float]()
    for reduce in fleet.reduces:
        assert reduce.phase == RoundProgress(number, 3, 400, count, weight, tuple(norms[-6:]))
        for source, round, samples in zip(reduce.sources, reduce.rounds, reduce.weights, strict=True):
            if (source.worker, round) not in ((1, 1), (2, 4)):
                count, weight = count + 1, weight + samples
                norms.append(10.0 * round + source.worker)
        if count >= 3:
            number, count, weight = number + 1, 0, 0
    assert len(norms) > 12 and len(fleet.noted("reject")) >= 1


def test_uniform_weights_count_each_delta_as_a_part_of_the_period() -> None:
    fleet = done(fleet_of(0.1, 0.3, sync={**ASYNC, "weighting": "uniform"}))
    assert all(reduce.phase and reduce.phase.unit == 2 and set(reduce.weights) == {1} for reduce in fleet.reduces)


def test_deltas_that_come_within_the_grace_time_are_merged_together() -> None:
    together = done(fleet_of(0.1, 0.101, 0.102, sync={**ASYNC, "arrival_grace_s": 1.0}))
    assert [[source.worker for source in reduce.sources] for reduce in together.reduces] == [[0, 1, 2]] * 3
    apart = done(fleet_of(0.1, 0.13, 0.17, sync={**ASYNC, "dynamic_local_steps": False}))
    assert all(len(reduce.sources) == 1 for reduce in apart.reduces)


def test_turns_that_are_to_end_together_wait_for_one_another_by_a_batch_of_the_slowest() -> None:
    fleet = done(fleet_of(*PAPER, update_rounds=6, sync=GATHERING))
    gathered = [[source.worker for source in reduce.sources] for reduce in fleet.reduces]
    assert gathered[1:] == [[0, 1, 2, 3]] * (len(gathered) - 1)
    assert {staleness for _, staleness in arrivals(fleet)[4:]} == {0}
    assert fleet.of_kind("round")[-1]["idle_fraction"] < 0.05


def test_worker_that_comes_at_another_time_than_the_others_soon_hands_over_with_them() -> None:
    fleet = fleet_of(0.1, 0.12, 0.2, update_rounds=8, sync=GATHERING)
    fleet.later(13.0, lambda: fleet.kill(1))
    done(fleet)
    gathered = [[source.worker for source in reduce.sources] for reduce in fleet.reduces]
    assert gathered[-3:] == [[0, 1, 2]] * 3 and [0, 2] in gathered


def test_fast_worker_that_joins_in_a_long_turn_of_a_slow_one_doesnt_fill_it_all() -> None:
    faults = Faults()
    fleet = fleet_of(0.5, 0.01, faults=faults, update_rounds=6, sync=GATHERING)
    faults.room = lambda source: source.worker == 0 or fleet.now > 30
    done(fleet)
    joined = next(note["monotonic_s"] for note in fleet.noted("join") if note["worker"] == 1)
    turns = [note for note in fleet.noted("plan") if note["monotonic_s"] > joined]
    assert max(note["batches"].get(1, 0) for note in turns) <= 150


def test_turns_of_equal_length_wait_for_nobody() -> None:
    fleet = done(fleet_of(0.1, 0.13, 0.17, sync={**GATHERING, "dynamic_local_steps": False}))
    assert all(len(reduce.sources) == 1 for reduce in fleet.reduces)


def test_grace_time_is_over_when_nobody_else_trains() -> None:
    fleet = done(fleet_of(0.1, 0.1, sync={**ASYNC, "arrival_grace_s": 50.0}))
    assert fleet.now < 60


# ── turns ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_dynamic_local_steps_let_all_hand_over_together_and_nobody_waits() -> None:
    fleet = done(fleet_of(*PAPER, update_rounds=6, sync=ASYNC))
    last = fleet.of_kind("round")[-1]
    assert list(last["batches"]) == [0, 1, 2, 3]
    times = [last["batches"][worker] * speed for worker, speed in enumerate(PAPER)]
    assert max(times) - min(times) <= max(PAPER)
    assert last["idle_fraction"] < 0.02 and last["staleness_max"] <= 4
    assert last["time_s"] == pytest.approx(100 / sum(1 / speed for speed in PAPER), rel=0.15)


def test_equal_turns_make_slow_workers_stale_by_what_the_others_do_meanwhile() -> None:
    fleet = done(fleet_of(*PAPER, update_rounds=6, sync={**ASYNC, "dynamic_local_steps": False}))
    plans = [batches for note in fleet.noted("plan") for batches in note["batches"].values()]
    assert set(plans) == {25} and not fleet.noted("correction")
    slowest = [staleness for worker, staleness in arrivals(fleet) if worker == 3]
    assert min(slowest) >= 10


def test_first_turn_is_resized_once_speeds_are_known() -> None:
    fleet = done(fleet_of(0.1, 0.9, update_rounds=2, sync=ASYNC))
    first = [at for at, command in fleet.commanded(c.Reduce)][:2]
    assert first[1] - first[0] <= 1.0, "the slow worker did all of an equal share"


@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_equal_batches_are_those_of_every_strategy(strategy: str) -> None:
    fleet = done(fleet_of(0.1, 0.4, sync={"strategy": strategy, "dynamic_local_steps": False}))
    deltas = [batches for note in fleet.noted("plan") for batches in note["batches"].values() if batches]
    assert set(deltas) == {50}


def test_learning_rates_follow_what_the_whole_fleet_has_trained() -> None:
    fleet = done(fleet_of(0.1, 0.3, update_rounds=5, sync=ASYNC))
    plans = [command.plan for _, command in fleet.commanded(c.Assign) if command.plan.version == 0]
    ranges = [plan.progress for plan in plans if plan.progress is not None]
    assert ranges[:2] == [(0.0, 1.0), (0.0, 1.0)]
    assert all(0 <= first <= last <= 5 for first, last in ranges)
    for worker in (0, 1):
        mine = [command.plan.progress for _, command in fleet.commanded(c.Assign) if command.worker == worker]
        ends = [one for one in mine if one is not None]
        assert all(later[0] >= earlier[0] for earlier, later in pairwise(ends))
    assert ranges[-1][1] == pytest.approx(5)


def test_weights_are_sent_to_those_who_have_handed_over_and_to_nobody_else() -> None:
    fleet = done(fleet_of(0.1, 0.13, 0.17, update_rounds=3, sync={**ASYNC, "dynamic_local_steps": False}))
    merges = [(at, command.worker) for at, command in fleet.commanded(c.Merge)]
    reduced = {at + 0.05: [source.worker for source in command.sources] for at, command in fleet.commanded(c.Reduce)}
    final = max(reduced)
    for at, worker in merges:
        if at > 0.5 and at < final - 1e-6:
            assert worker in next(workers for done_at, workers in reduced.items() if abs(done_at - at) < 1e-6)


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_lost_worker_costs_its_turn_and_its_samples_are_given_out_again() -> None:
    fleet = fleet_of(0.1, 0.13, update_rounds=4, sync=ASYNC)
    fleet.later(8.0, lambda: fleet.kill(1))
    done(fleet)
    assert {one.incarnation for p in fleet.persisted for one in p.verdict.accepted if one.worker == 1} == {10001, 10002}


def test_worker_lost_while_its_delta_is_merged_has_it_counted() -> None:
    fleet = fleet_of(0.1, 0.2, faults=FIRST_ONLY, update_rounds=3, sync=ASYNC)
    fleet.on(c.Reduce, lambda: fleet.kill(1), 0.01, lambda command: 1 in [one.worker for one in command.sources])
    done(fleet)
    assert [worker for worker, _ in arrivals(fleet)].count(1) == 1
    assert fleet.persisted[-1].state["totals"]["samples_total"] == len(used(fleet))


def test_worker_that_leaves_hands_over_what_it_has() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=4, sync=ASYNC)
    fleet.later(7.0, lambda: fleet.preempt(1))
    done(fleet)
    parts = [sum(s.samples for s in spans) for p in fleet.persisted for worker, spans in p.spans if worker == 1]
    assert min(parts) < max(parts)


def test_stale_delta_is_rejected_with_a_reason_and_its_samples_are_used_by_others() -> None:
    sync = {**ASYNC, "dynamic_local_steps": False, "max_staleness": 3}
    fleet = done(fleet_of(0.1, 0.1, 0.8, update_rounds=10, sync=sync))
    reasons = [note["reason"] for note in fleet.noted("reject")]
    assert reasons and all("deltas were merged since its weights, more than 3" in reason for reason in reasons)
    assert max(staleness for _, staleness in arrivals(fleet)) <= 3
    rejected = [one for persist in fleet.persisted for one in persist.verdict.rejected]
    assert [one.worker for one in rejected] == [2] * len(rejected) and rejected
    assert not fleet.noted("exclude"), "a slow worker is taken for a bad one"


def test_worker_whose_deltas_are_rejected_is_excluded_and_the_run_goes_on() -> None:
    faults = Faults(reject=lambda delta: "non-finite values" if delta.source.worker == 1 else None)
    fleet = done(fleet_of(0.1, 0.1, 0.1, faults=faults, update_rounds=6, sync={**ASYNC, "strikes": 2}))
    assert [note["worker"] for note in fleet.noted("exclude")] == [1]
    assert {worker for worker, _ in arrivals(fleet)} == {0, 2}
    assert len(fleet.persisted) == 6


def test_run_whose_every_delta_is_rejected_ends_with_an_error() -> None:
    fleet = fleet_of(0.1, 0.1, faults=Faults(reject=lambda delta: "non-finite values"), sync=ASYNC)
    fleet.run()
    assert getattr(fleet.error, "code", None) == "TRN001"


def test_repeated_delta_is_passed_over() -> None:
    fleet = fleet_of(0.1, 0.1, sync=ASYNC)
    said: list[Delta] = []
    fleet.on(c.Persist, lambda: [fleet.tell(delta) for delta in said or list(fleet.deltas.values())])
    done(fleet)
    assert len(fleet.noted("stale")) >= 1


def test_verdict_that_comes_again_is_passed_over() -> None:
    fleet = fleet_of(0.1, 0.13, update_rounds=3, sync=ASYNC)
    verdicts: list[c.Reduced] = []
    tell = fleet.tell

    def spy(event: c.Input) -> None:
        if isinstance(event, c.Reduced):
            verdicts.append(event)
        tell(event)

    fleet.tell = spy  # type: ignore[method-assign]
    fleet.on(c.Reduce, lambda: tell(verdicts[0]), 0.001, lambda command: command.round == 1)
    done(fleet)
    assert [persist.state["merged"] for persist in fleet.persisted] == [2, 4, 6]


# ── going on ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_next_scheduler_goes_on_from_the_last_commit_with_steps_that_go_on() -> None:
    tables: Any = {"update_rounds": 6, "sync": ASYNC}
    whole = done(fleet_of(0.1, 0.3, **tables))
    some = fleet_of(0.1, 0.3, **tables)
    rest = Fleet(some.job, [0.1, 0.3], slices_of(20, 64), past=past_of(whole.persisted[:3]))
    rest.run()
    assert [persist.round for persist in rest.persisted] == [3, 4, 5]
    assert rest.reduces[0].round == whole.persisted[2].state["step"]
    both = [*whole.persisted[:3], *rest.persisted]
    spans = [span for persist in both for _, part in persist.spans for span in part]
    samples = [(s.epoch, s.slice, n) for s in spans for n in range(s.start, s.stop)]
    assert len(samples) == len(set(samples)) == rest.persisted[-1].state["totals"]["samples_total"]


def test_milestones_are_evaluated_by_those_who_get_their_weights() -> None:
    fleet = done(fleet_of(0.1, 0.3, faults=Faults(evaluate_s=0.5), update_rounds=6, sync=ASYNC))
    records = [(record["round"], record["count"]) for record in fleet.of_kind("eval")]
    assert records == [(number, 128) for number in range(6)]
    for _, command in fleet.commanded(c.Assign):
        if command.plan.evaluate:
            steps = [persist.state["step"] for persist in fleet.persisted]
            assert command.plan.round in steps


def kill_an_evaluating_worker(fleet: Fleet) -> None:
    evaluating: list[int] = []
    fleet.on(
        c.Assign,
        lambda: fleet.kill(evaluating[0]),
        0.5,
        lambda command: bool(command.plan.evaluate) and not evaluating.append(command.worker),
    )


def test_evaluation_whose_worker_is_lost_is_left_out_and_the_next_one_is_made() -> None:
    faults = Faults(evaluate_s=1.0, room=FIRST_ONLY.room)
    fleet = fleet_of(0.1, 0.3, faults=faults, update_rounds=6, sync=ASYNC)
    kill_an_evaluating_worker(fleet)
    done(fleet)
    assert [record["round"] for record in fleet.of_kind("eval")] == [1, 2, 3, 4, 5]
    assert [record["round"] for record in fleet.of_kind("round")] == [0, 1, 2, 3, 4, 5]


def test_final_evaluation_is_shared_by_all() -> None:
    fleet = done(fleet_of(0.1, 0.1, 0.1, update_rounds=2, sync=ASYNC))
    final = [command for _, command in fleet.commanded(c.Assign) if command.plan.final]
    assert sorted(command.worker for command in final) == [0, 1, 2] and all(one.plan.evaluate for one in final)


def test_joiner_that_comes_after_the_weights_of_a_lost_share_doesnt_evaluate_it() -> None:
    faults = Faults(evaluate_s=1.0, start_s=9.0)
    fleet = fleet_of(0.1, 0.3, faults=faults, update_rounds=8, sync=ASYNC)
    kill_an_evaluating_worker(fleet)
    done(fleet)
    assert [record["round"] for record in fleet.of_kind("eval")] == [1, 2, 3, 4, 5, 6, 7]


def test_delta_of_a_joiner_that_began_with_other_weights_is_left_out() -> None:
    lies = Source("virtual", 1, 10_002)
    faults = Faults(proof=lambda source, right: "false" if source == lies else right, start_s=0.01)
    sync = {**ASYNC, "dynamic_local_steps": False, "arrival_grace_s": 20.0}
    fleet = fleet_of(0.1, 0.1, 3.0, faults=faults, update_rounds=4, samples=12, sync=sync)
    fleet.on(c.Persist, lambda: fleet.kill(1), 0.001)
    done(fleet)
    assert any("began with other weights" in note["reason"] for note in fleet.noted("loss"))
    assert any(worker == 1 for worker, _ in arrivals(fleet))
    assert all(one.incarnation != 10_002 for p in fleet.persisted for one in p.verdict.accepted if one.worker == 1)
