"""Quorum and grace time that are chosen by the arrivals of earlier rounds."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config.schema import Sync
from hypha_ray.scheduler.barrier.round import BarrierRound, QuorumPlanner, RoundQuorum
from hypha_ray.types import Delta, Source, Span, WeightsVersion
from tests.support.fleet import Fleet, fleet_of, job_of, rounds, slices_of

AUTO = {"quorum": "auto", "grace_s": "auto"}
SAMPLES = 100
"""Samples of each delta."""


def closed(number: int, *arrivals: float, lost: tuple[float, ...] = (), late: tuple[float, ...] = ()) -> BarrierRound:
    """A round that has begun at 1000 s, with deltas at these times after that."""
    round = BarrierRound(number, 1000.0, None, WeightsVersion(number))
    for worker, arrival_s in enumerate(arrivals):
        spans = (Span(0, worker, 0, SAMPLES),)
        source = Source("run", worker, 1)
        figures = (SAMPLES, SAMPLES, SAMPLES, 10, 3.0, 1, 1000, arrival_s, 0.0)
        round.deltas[worker] = Delta(source, number, spans, *figures)
        round.delivered_at[worker] = 1000.0 + arrival_s
    round.lost_at = [1000.0 + at_s for at_s in lost]
    round.late = [(1000.0 + at_s, SAMPLES) for at_s in late]
    round.closed_at = 1000.0 + max(arrivals)
    return round


def chosen(*arrivals: BarrierRound, workers: int = 8, exchange_s: float = 0.0, **sync: Any) -> RoundQuorum:
    """Quorum after these rounds."""
    planner = QuorumPlanner(Sync.model_validate(AUTO | sync))
    for round in arrivals:
        planner.observe(round, round.closed_at + exchange_s)
    return planner.choose(workers)


SEVEN = (9.1, 9.2, 9.3, 9.4, 9.5, 9.8, 10.0)


def test_straggler_that_doubles_the_round_is_not_waited_for() -> None:
    quorum = chosen(*[closed(number, *SEVEN, 20.0) for number in (1, 2, 3)])
    assert quorum.deltas == 7
    assert quorum.grace_s < 10.0


def test_delta_that_is_worth_its_wait_is_waited_for() -> None:
    # 11 s for 800 samples are better than 10 s for 700.
    assert chosen(*[closed(number, *SEVEN, 11.0) for number in (1, 2, 3)]) == RoundQuorum()


def test_exchange_counts_for_each_round_so_waiting_is_cheaper_with_a_long_one() -> None:
    # 13 s for 800 samples are worse than 10 s for 700, but 33 s for 800 are better than 30 s for 700.
    arrivals = [closed(number, *SEVEN, 13.0) for number in (1, 2, 3)]
    assert chosen(*arrivals).deltas == 7
    assert chosen(*arrivals, exchange_s=20.0) == RoundQuorum()


def test_risk_of_a_loss_is_met_by_a_grace_time_that_drops_nobody_in_calm_rounds() -> None:
    calm = [closed(number, *SEVEN, 10.5) for number in (1, 2, 3)]
    quorum = chosen(*calm, closed(4, *SEVEN, lost=(130.0,)))
    assert quorum.deltas == 7
    assert quorum.grace_s == pytest.approx(0.5)


def test_deltas_expected_after_an_early_end_count_so_waiting_can_become_worthwhile_again() -> None:
    early = [closed(number, *SEVEN, late=(20.0,)) for number in (1, 2, 3)]
    assert chosen(*early).deltas == 7
    quick = [closed(number, *SEVEN, late=(10.6,)) for number in range(4, 20)]
    assert chosen(*early, *quick) == RoundQuorum()


def test_first_round_and_fewer_than_three_others_are_no_ground_to_choose_on() -> None:
    rounds_with_straggler = [closed(number, *SEVEN, 20.0) for number in (0, 1, 2)]
    assert chosen(*rounds_with_straggler) == RoundQuorum()


def test_small_fleet_waits_for_all_because_every_delta_is_more_than_a_quarter() -> None:
    slow = [closed(number, 9.0, 10.0, 90.0) for number in (1, 2, 3)]
    assert chosen(*slow, workers=3) == RoundQuorum()


def test_quorum_of_the_job_gets_a_grace_time_and_grace_time_of_the_job_a_quorum() -> None:
    slow = [closed(number, *SEVEN[:6], 19.0, 20.0) for number in (1, 2, 3)]
    assert chosen(*slow, quorum=6).deltas == 6
    assert chosen(*slow, grace_s=0.5) == RoundQuorum(6, 0.5)


def test_quorum_and_grace_time_of_the_job_are_taken_as_they_are() -> None:
    slow = [closed(number, *SEVEN, 20.0) for number in (1, 2, 3)]
    assert chosen(*slow, quorum=8, grace_s=30.0) == RoundQuorum(8, 30.0)
    assert chosen(*slow, quorum=None, grace_s=30.0) == RoundQuorum(None, 30.0)


def run_with_straggler(**sync: Any) -> Fleet:
    """Eight workers with equal batches, of which one is four times as slow."""
    sync = {"dynamic_local_steps": False, **sync}
    job = job_of(rounds=rounds(10, samples=320), sync=sync)
    return Fleet(job, [0.1] * 7 + [0.4], slices_of(60, 64)).run()


def test_run_leaves_its_straggler_behind_from_the_fifth_round_on_and_is_quicker_per_sample() -> None:
    auto = run_with_straggler(**AUTO)
    patient = run_with_straggler()
    assert auto.error is None
    plans = auto.noted("plan")[:10]
    assert [note["quorum"] for note in plans] == [None] * 4 + [7] * 6
    seconds = [record["time_s"] for record in auto.of_kind("round")]
    assert max(seconds[4:]) < 0.5 * min(seconds[:4])
    paces = [run.of_kind("round")[-1] for run in (auto, patient)]
    auto_s, patient_s = (record["elapsed_s"] / record["samples_total"] for record in paces)
    assert auto_s < 0.75 * patient_s


def test_run_with_equal_workers_waits_for_all() -> None:
    fleet = fleet_of(*[0.1] * 8, update_rounds=8, samples=320, sync=AUTO, slices=slices_of(60, 64)).run()
    assert {note["quorum"] for note in fleet.noted("plan")} == {None}
    assert {sum(part.samples for part in persist.verdict.accepted) for persist in fleet.persisted} == {320}
