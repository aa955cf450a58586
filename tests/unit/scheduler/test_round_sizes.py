"""Rounds that grow until exchanges take a small enough part of the time (`rounds.max_exchange_share`)."""

from __future__ import annotations

from typing import Any

import pytest

from hypha_ray.config.load import load
from hypha_ray.errors import ConfigError
from hypha_ray.fleet_time import FleetTime
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.round_sizes import MOST, RoundSizes, longest_round
from tests.support.epochs import uses, with_epochs
from tests.support.fleet import Faults, Fleet, job_of, past_of, slices_of

SLICES = slices_of(train=40, samples=64, validation=0)
"""2 560 samples."""
LIMIT = 0.2


def grown_fleet(limit: float | None = LIMIT, epochs: int = 3, faults: Faults | None = None, **more: Any) -> Fleet:
    """Two workers whose round of 16 samples takes 0.2 s, and its exchange about 0.1 s."""
    table = {"samples_between_updates": 16, "max_batch_size": 4, "max_exchange_share": limit, "evaluate_every": 0}
    job = with_epochs(job_of(rounds=table, resources={"num_workers": 2}), SLICES, epochs)
    return Fleet(job, [0.1, 0.1], SLICES, faults, **more)


def exact(persisted: list[c.Persist], epochs: int = 3) -> bool:
    counts = uses(persisted)
    return len(counts) == 2560 and set(counts.values()) == {epochs}


def samples_of_rounds(fleet: Fleet) -> list[int]:
    return [sum(part.samples for part in persist.verdict.accepted) for persist in fleet.persisted]


def exchange_shares(fleet: Fleet) -> list[float]:
    return [record["sync_s"] / record["time_s"] for record in fleet.of_kind("round")]


@pytest.mark.slow
def test_rounds_grow_until_exchanges_take_the_asked_part_and_every_sample_is_used_as_often_as_asked() -> None:
    fleet = grown_fleet().run()
    assert fleet.error is None
    assert exact(fleet.persisted)
    assert [bool(persist.state.get("last")) for persist in fleet.persisted].index(True) == len(fleet.persisted) - 1
    usual = grown_fleet(limit=None).run()
    assert exchange_shares(usual)[-2] > 1.5 * LIMIT
    assert exchange_shares(fleet)[-2] <= LIMIT
    assert exchange_shares(fleet)[-2] > LIMIT / 2, "rounds are longer than they need be"
    assert len(fleet.persisted) < 0.6 * len(usual.persisted)


def test_growth_is_recorded_with_its_reason_and_the_number_of_rounds_follows() -> None:
    fleet = grown_fleet().run()
    notes = fleet.noted("round_growth")
    assert notes
    sizes = samples_of_rounds(fleet)
    for note in notes:
        assert note["exchange_share"] > LIMIT
        assert sizes[note["round"]] == note["samples"] > sizes[note["round"] - 1]
    records = fleet.of_kind("round")
    assert records[0]["rounds"] == 480
    assert [record["rounds"] for record in records[-3:]] == [len(records)] * 3
    assert records[-1]["eta_s"] == 0.0


def test_schedules_follow_the_samples_of_rounds_that_grow() -> None:
    fleet = grown_fleet().run()
    progress: dict[int, tuple[float, float]] = {}
    for _, order in fleet.commanded(c.Assign):
        if order.plan.progress is not None:
            progress[order.plan.round] = order.plan.progress
    trained = 0
    for number, samples in enumerate(samples_of_rounds(fleet)):
        assert progress[number] == pytest.approx((trained / 16, (trained + samples) / 16))
        trained += samples


@pytest.mark.slow
@pytest.mark.parametrize("committed", [1, 5, 40])
def test_resumed_run_keeps_its_sizes_and_ends_exactly(committed: int) -> None:
    whole = grown_fleet().run()
    assert committed < len(whole.persisted)
    before = whole.persisted[:committed]
    rest = grown_fleet(past=past_of(before)).run()
    assert rest.error is None
    assert exact(before + rest.persisted)
    assert samples_of_rounds(rest)[0] >= samples_of_rounds(whole)[committed - 1]


def test_killed_worker_leaves_no_sample_unused() -> None:
    fleet = grown_fleet()
    fleet.on(c.Persist, lambda: fleet.kill(1), 0.15, lambda persist: persist.round == 9)
    fleet.run()
    assert fleet.noted("loss")
    assert exact(fleet.persisted)


def test_rounds_are_at_most_sixteen_times_as_long() -> None:
    fleet = grown_fleet(limit=0.001).run()
    assert max(samples_of_rounds(fleet)) == MOST * 16
    assert exact(fleet.persisted)


def times(exchange: float, training: float) -> FleetTime:
    time = FleetTime()
    time.seconds |= {"exchange": exchange, "training": training}
    return time


def sizes_of(limit: float | None, **rounds: int) -> RoundSizes:
    table = {"samples_between_updates": 100, "max_exchange_share": limit, "epochs": 1, **rounds}
    return RoundSizes(job_of(rounds=table), {})


def test_factor_is_the_one_by_which_the_rest_of_the_time_has_to_grow() -> None:
    sizes = sizes_of(0.25)
    sizes.observe(1, times(exchange=1.0, training=2.0))  # A third; a quarter needs 3 s of training.
    assert sizes.samples == 150
    sizes.observe(2, times(exchange=1.0, training=2.0))  # That round was planned before.
    assert sizes.samples == 150
    sizes.begin(3)
    sizes.observe(3, times(exchange=1.0, training=3.0))
    assert sizes.samples == 150


def test_rounds_at_most_double_at_once() -> None:
    sizes = sizes_of(0.1)
    sizes.observe(1, times(exchange=9.0, training=1.0))
    assert sizes.samples == 200


def test_first_and_warm_up_rounds_are_not_judged() -> None:
    sizes = sizes_of(0.1, warmup_rounds=3)
    for number in range(3):
        sizes.observe(number, times(exchange=9.0, training=1.0))
    assert sizes.samples == 100


def test_longest_round_is_what_ledgers_have_to_expect() -> None:
    job = job_of(rounds={"samples_between_updates": 100, "epochs": 1, "max_exchange_share": 0.1})
    assert longest_round(job) == 1600
    assert longest_round(job_of(rounds={"samples_between_updates": 100})) == 100


REFUSED = [
    ("--run.mode=replay", "run.mode"),
    ("--sync.strategy=async", "sync.strategy"),
    ("--sync.strategy=sync", "sync.strategy"),
    ("--sync.fragments=2", "sync.fragments"),
    ("--outer_optimizer.schedule=cosine", "outer_optimizer.schedule"),
]


@pytest.mark.parametrize(("flag", "key"), REFUSED)
def test_what_needs_the_number_of_rounds_is_refused(flag: str, key: str) -> None:
    with pytest.raises(ConfigError, match="exclude each other") as caught:
        load(["--rounds.max_exchange_share", "0.1", "--rounds.epochs", "2", *flag.split("=")])
    assert caught.value.code == "CFG011"
    assert key in str(caught.value)


def test_growth_without_epochs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give rounds\.epochs") as caught:
        load(["--rounds.max_exchange_share", "0.1"])
    assert caught.value.code == "CFG011"
