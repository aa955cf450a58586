"""Use of the fleet's time: every second of runs whose times are known is worked out by hand, and none is lost.

On the fleet's virtual clock a message takes 0.01 s, a reduction 0.05 s, and a worker is ready 0.1 s after its hire. A
plan and weights that are sent at t are merged at t + 0.01, and the scheduler hears of it at t + 0.02.
"""

from __future__ import annotations

import random
from functools import cached_property
from typing import Any

import pytest

from hypha_ray.fleet_time import TIME_KINDS, FleetTime, goodput
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.types import Delta, Source, Verdict
from tests.support.fleet import FIRST_ONLY, Faults, Fleet, done, fleet_of, job_of, past_of, rounds, slices_of
from tests.support.golden import SYNCS, _strike

EQUAL: dict[str, Any] = {"dynamic_local_steps": False}
"""Each of two workers has half of a round's 60 batches, whatever its speed."""


def seconds(time: FleetTime) -> dict[str, float]:
    """Seconds of the kinds that have any, to the microsecond."""
    return {kind: round(used, 6) for kind, used in time.seconds.items() if round(used, 6)}


def of_round(fleet: Fleet, number: int) -> dict[str, float]:
    return seconds(FleetTime.of_records([fleet.of_kind("round")[number]]))


def by_worker(fleet: Fleet, number: int) -> dict[str, dict[str, float]]:
    times = fleet.of_kind("round")[number]["time_by_worker"]
    return {worker: {kind: round(used, 6) for kind, used in time.items()} for worker, time in times.items()}


SLOWER = {"training": 6.0, "exchange": 0.07}


def closing(fleet: Fleet) -> FleetTime:
    time = fleet.core.closing_time
    assert time is not None
    return time


def total(fleet: Fleet) -> FleetTime:
    time = FleetTime.of_records(fleet.of_kind("round"))  # type: ignore[arg-type]
    time.add(closing(fleet))
    return time


def equal_fleet(faults: Faults | None = None, update_rounds: int = 2, **tables: Any) -> Fleet:
    """Workers of 0.1 s and 0.2 s a batch of 4 samples: 3 s and 6 s a round of 30 batches each."""
    sync = {**EQUAL, **tables.pop("sync", {})}
    return fleet_of(0.1, 0.2, faults=faults, update_rounds=update_rounds, samples=240, sync=sync, **tables)


def test_rounds_with_a_barrier_and_an_evaluation_at_the_end() -> None:
    fleet = done(equal_fleet(Faults(evaluate_s=0.5), rounds={"evaluate_every": 2}))
    # Hired at 0, ready at 0.11, weights merged at 0.13; deltas at 3.13 and 6.13; merged again at 6.13 + 0.05 + 0.02.
    assert of_round(fleet, 0) == {"start": 2 * 0.13, "training": 9.0, "barrier": 3.0, "exchange": 2 * 0.07}
    assert of_round(fleet, 1) == {"training": 9.0, "barrier": 3.0, "exchange": 2 * 0.07}
    assert by_worker(fleet, 1) == {"0": {"training": 3.0, "barrier": 3.0, "exchange": 0.07}, "1": SLOWER}
    assert seconds(closing(fleet)) == {"evaluation": 1.0}
    assert total(fleet).total_s == pytest.approx(2 * fleet.now)
    first, second = fleet.of_kind("round")
    assert first["fleet_s"] == pytest.approx(2 * 6.2) and second["fleet_s"] == pytest.approx(2 * 6.07)
    assert first["time_shares"]["training"] == pytest.approx(9.0 / 12.4)
    # 40 and 20 samples a second while they train.
    assert first["possible_samples"] == pytest.approx(60 * 6.2) and first["goodput"] == pytest.approx(240 / 372)
    assert closing(fleet).possible_samples == pytest.approx(60 * 0.5)


def test_evaluation_between_rounds_is_time_of_the_next_round() -> None:
    fleet = done(equal_fleet(Faults(evaluate_s=0.5), rounds={"evaluate_every": 1}))
    assert of_round(fleet, 1) == {"evaluation": 1.0, "training": 9.0, "barrier": 3.0, "exchange": 2 * 0.07}


def test_worker_killed_while_it_trains_loses_its_time_and_its_successor_starts() -> None:
    fleet = equal_fleet(update_rounds=1, rounds={"evaluate_every": 0})
    fleet.later(2.13, lambda: fleet.kill(1))
    done(fleet)
    # Killed 2 s after its merge, hired again at once, ready after 0.11 s, weights merged 0.02 s later.
    spent = total(fleet)
    assert spent.seconds["start"] == pytest.approx(2 * 0.13 + 0.13)
    assert spent.seconds["loss"] == pytest.approx(2.0)
    assert spent.seconds["exchange"] == pytest.approx(2 * 0.07)
    assert spent.total_s == pytest.approx(2 * fleet.now)
    slow, fast = (sum(delta.train_s for source, delta in fleet.deltas.items() if source.worker == n) for n in (1, 0))
    assert spent.seconds["training"] == pytest.approx(slow + fast)


def test_machine_that_stays_away_is_lost_time_without_possible_samples() -> None:
    fleet = equal_fleet(FIRST_ONLY, update_rounds=1, rounds={"evaluate_every": 0})
    fleet.later(2.13, lambda: fleet.kill(1))
    done(fleet)
    spent = total(fleet)
    assert spent.seconds["loss"] == pytest.approx(fleet.now - 0.13)
    assert spent.seconds["start"] == pytest.approx(2 * 0.13)
    # The other worker alone has a speed: 40 samples a second, also for the 2.13 s of the lost one.
    assert spent.possible_samples == pytest.approx(40 * (fleet.now + 2.13))


def test_silent_worker_is_lost_time_from_its_last_event_on() -> None:
    fleet = equal_fleet(update_rounds=1, rounds={"evaluate_every": 0})
    fleet.later(2.0, lambda: fleet.hang(1))
    done(fleet)
    (loss,) = fleet.noted("loss")
    assert "silent" in loss["reason"] and loss["monotonic_s"] > 3.0
    # The round closes with the loss, so the run ends before there is a machine for the successor.
    assert total(fleet).seconds["loss"] == pytest.approx(fleet.now - 0.13)


def test_rejected_delta_is_lost_training() -> None:
    faults = Faults(reject=lambda delta: LOST if delta.source.worker == 1 and delta.round == 0 else None)
    fleet = done(equal_fleet(faults, rounds={"evaluate_every": 0}))
    assert of_round(fleet, 0) == {"start": 0.26, "training": 3.0, "loss": 6.0, "barrier": 3.0, "exchange": 0.14}
    assert fleet.of_kind("round")[0]["goodput"] == pytest.approx(120 / (60 * 6.2))


def test_straggler_after_the_grace_time_trains_for_nothing() -> None:
    fleet = done(equal_fleet(sync={"quorum": 1, "grace_s": 1.0}, rounds={"evaluate_every": 0}))
    # The round closes at 3.13 + 1, so 4 s of the slow worker are lost; its batch under way ends before it merges.
    spent = of_round(fleet, 0)
    assert spent["training"] == 3.0 and spent["loss"] == 4.0 and spent["barrier"] == 1.0


def test_training_that_overlaps_the_exchange_costs_nothing() -> None:
    tables: dict[str, Any] = {"rounds": {"evaluate_every": 0}, "update_rounds": 4, "samples": 240}
    fleet = done(fleet_of(0.1, 0.1, sync={**EQUAL, "delay_steps": 2}, **tables))
    # Each worker has 3 s of batches a round. Two batches ahead take longer than the 0.07 s of an exchange, so only the
    # first weights and the last ones are waited for.
    spent = total(fleet)
    assert spent.seconds["training"] == pytest.approx(2 * 4 * 3.0)
    assert spent.seconds["start"] == pytest.approx(2 * 0.13)
    assert spent.seconds["barrier"] == pytest.approx(0.0, abs=1e-6)
    assert spent.seconds["exchange"] == pytest.approx(2 * fleet.now - spent.seconds["training"] - 0.26)
    assert spent.seconds["exchange"] < 0.5 * sum(0.14 for _ in range(4))


def test_wait_beyond_the_training_ahead_is_for_slower_workers_first() -> None:
    tables: dict[str, Any] = {"rounds": {"evaluate_every": 0}, "update_rounds": 2, "samples": 240}
    fleet = done(fleet_of(0.1, 0.2, sync={**EQUAL, "delay_steps": 5}, **tables))
    # The fast worker delivers at 3.13, trains ahead for 0.5 s, and waits 2.5 s for the slow one's delta of 6.13. Both
    # merge 0.06 s later: the fast one delivers after 2.5 s more, the slow one trains ahead for 1 s and then for 5 s.
    spent = total(fleet)
    assert spent.seconds["barrier"] == pytest.approx(2.5 + (12.13 - 8.70))


def test_workers_without_a_barrier_wait_for_the_grace_time_alone() -> None:
    sync = {"strategy": "async", "arrival_grace_s": 0.0, **EQUAL}
    fleet = done(fleet_of(0.1, 0.1, update_rounds=3, samples=240, sync=sync, rounds={"evaluate_every": 0}))
    spent = total(fleet)
    assert spent.seconds["training"] == pytest.approx(sum(record["samples"] for record in fleet.of_kind("round")) / 40)
    assert spent.seconds["start"] == pytest.approx(0.26)
    assert spent.total_s == pytest.approx(2 * fleet.now)


def test_run_that_ends_early_has_lost_the_round_in_progress() -> None:
    fleet = equal_fleet(Faults(evaluate_s=0.5), 9, rounds={"evaluate_every": 1, "patience": 1})
    fleet.run()
    assert fleet.error is None and fleet.noted("stop")
    assert total(fleet).total_s == pytest.approx(2 * fleet.now)
    committed = sum(record["samples"] for record in fleet.of_kind("round"))
    assert total(fleet).seconds["training"] == pytest.approx(committed / 240 * 9.0)


def test_work_after_the_last_commit_of_an_earlier_attempt_is_lost() -> None:
    first = done(equal_fleet(update_rounds=1, rounds={"evaluate_every": 0}))
    past = past_of(first.persisted)
    object.__setattr__(past, "lost_s", 2.5)
    fleet = done(equal_fleet(rounds={"evaluate_every": 0}, past=past))
    (record,) = fleet.of_kind("round")
    assert seconds(FleetTime.of_records([record]))["loss"] == 5.0
    assert record["possible_samples"] == pytest.approx(60 * (6.2 + 2.5))


def test_time_before_a_machine_is_found_does_not_count() -> None:
    fleet = equal_fleet(update_rounds=1, rounds={"evaluate_every": 0})
    fleet.later(0.04, lambda: [fleet.tell(c.Leased(source)) for source in fleet.hiring.values()])
    assert total(done(fleet)).total_s == pytest.approx(2 * (fleet.now - 0.04))


class CountedFleet(Fleet):
    """Adds up the training behind accepted deltas."""

    useful_s = 0.0

    def take_in(self, event: c.Input) -> list[c.Command]:
        if isinstance(event, Delta):
            self.trained_s[event.source, event.round] = event.train_s
        return super().take_in(event)

    def verdict(self, command: c.Reduce) -> Verdict:
        verdict = super().verdict(command)
        accepted = {contribution.worker for contribution in verdict.accepted}
        numbers = command.rounds or [command.round] * len(command.sources)
        for source, round in zip(command.sources, numbers, strict=True):
            if source.worker in accepted:
                self.useful_s += self.trained_s[source, round]
        return verdict

    @cached_property
    def trained_s(self) -> dict[tuple[Source, int], float]:
        return {}


def stormy_fleet(name: str, seed: int) -> CountedFleet:
    """Five workers of unlike speeds, some of which die, hang or leave; a delta is rejected."""
    rng = random.Random(f"{name}/{seed}")
    faults = Faults(reject=lambda delta: LOST if delta.source.worker == 1 and delta.round == 1 else None)
    job = job_of(
        run={"name": "virtual", "mode": "replay" if name == "replay" else "elastic"},
        rounds=rounds(4, 200),
        sync=SYNCS[name],
        resources={"num_workers": 5, "min_workers": 1},
    )
    speeds: list[Any] = [rng.uniform(0.3, 3.0) for _ in range(5)]
    fleet = CountedFleet(job, speeds, slices_of(), Faults() if name == "replay" else faults)
    for number in range(5):
        for kind in (fleet.kill, fleet.hang, fleet.preempt):
            if rng.random() < 0.15:
                fleet.later(rng.uniform(1.0, 40.0), lambda kind=kind, number=number: _strike(fleet, kind, number))
    return fleet


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.long(keep=10)
def test_every_second_is_accounted_for_once_whatever_dies(name: str, seed: int) -> None:
    fleet = stormy_fleet(name, seed)
    done(fleet)
    spent = total(fleet)
    assert spent.total_s == pytest.approx(5 * fleet.now)
    assert min(spent.seconds.values()) >= 0
    assert spent.seconds["training"] == pytest.approx(fleet.useful_s)
    records = fleet.of_kind("round")
    for record in records:
        assert set(record["time_shares"]) == set(TIME_KINDS)
        assert sum(record["time_shares"].values()) == pytest.approx(1.0)
        assert 0 < record["goodput"] <= 1
        for kind, share in record["time_shares"].items():
            worker_s = sum(time.get(kind, 0.0) for time in record["time_by_worker"].values())
            assert worker_s == pytest.approx(share * record["fleet_s"])
    samples = sum(record["samples"] for record in records)
    assert 0 < (goodput(samples, spent.possible_samples) or 0) < 1


def test_goodput_of_no_time_is_unknown() -> None:
    assert goodput(0, 0.0) is None
    assert FleetTime().fields() == {"fleet_s": 0.0, "time_shares": None, "possible_samples": 0.0}
