"""The scheduler's core on a virtual clock."""

from __future__ import annotations

import math

import pytest

from hypha_ray.config.load import load
from hypha_ray.errors import CapacityError, ConfigError
from hypha_ray.scheduler import messages as c
from hypha_ray.types import Delta, Source
from tests.support.fleet import FIRST_ONLY, Faults, Fleet, fleet_of, slices_of, used
from tests.support.forked_process import ROOT


def test_run_with_equal_workers_commits_every_round_and_ends() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=4, samples=256).run()
    assert fleet.error is None
    assert [record["round"] for record in fleet.of_kind("round")] == [0, 1, 2, 3]
    assert [persist.round for persist in fleet.persisted] == [0, 1, 2, 3]
    assert [record["samples"] for record in fleet.of_kind("round")] == [256] * 4
    assert fleet.of_kind("round")[-1]["samples_total"] == 1024
    assert [record["round"] for record in fleet.of_kind("eval")] == [0, 1, 2, 3]


def test_run_over_several_epochs_uses_every_sample_once_in_each() -> None:
    fleet = fleet_of(
        0.1, 0.23, 0.07, slices=slices_of(5, 60), update_rounds=6, samples=200, rounds={"max_batch_size": 8}
    ).run()
    counts = used(fleet)
    assert set(counts.values()) == {1}
    whole = fleet.persisted[-1].epoch
    assert whole >= 3
    assert all(counts[(epoch, index, n)] for epoch in range(whole) for index in range(5) for n in range(60))


def test_round_larger_than_the_dataset_keeps_its_size() -> None:
    fleet = fleet_of(0.1, 0.1, slices=slices_of(2, 50), update_rounds=2, samples=400).run()
    assert [record["samples"] for record in fleet.of_kind("round")] == [400, 400]


def test_unequal_speeds_after_the_second_round_waste_little() -> None:
    fleet = fleet_of(0.05, 0.1, 0.2, slices=slices_of(40, 256), update_rounds=6, samples=1400).run()
    later = fleet.of_kind("round")[2:]
    assert max(record["idle_fraction"] for record in later) <= 0.05
    assert max(record["plan_error"] for record in later) <= 0.05
    batches = later[-1]["batches"]
    assert batches[0] == pytest.approx(2 * batches[1], rel=0.1) == pytest.approx(4 * batches[2], rel=0.1)


@pytest.mark.slow
def test_islands_whose_responses_lengthen_wait_little_at_speeds_of_one_and_two() -> None:
    flags = ("--run.name=virtual", "--rounds.update_rounds=8", "--resources.num_workers=2")
    job = load(["@", str(ROOT / "jobs/configs/gsm8k.toml"), *flags]).job
    speeds = [lambda now, first=first: first * (3 - 2 * math.exp(-now / 1500)) for first in (10, 20)]
    fleet = Fleet(job, speeds, slices_of(100, 256)).run()

    records = fleet.of_kind("round")
    assert len(records) == 8 and max(record["idle_fraction"] for record in records[2:]) <= 0.05
    assert records[-1]["batches"] == {0: 27, 1: 13}
    assert records[-1]["time_s"] > 2 * records[0]["time_s"]
    assert set(used(fleet).values()) == {1}


def test_rounds_of_the_warmup_are_one_batch_of_every_worker_however_fast() -> None:
    warmup = {"warmup_rounds": 3}
    fleet = fleet_of(0.05, 0.2, slices=slices_of(20, 256), update_rounds=5, samples=800, rounds=warmup).run()
    records = fleet.of_kind("round")
    assert [record["batches"] for record in records[:3]] == [{0: 1, 1: 1}] * 3
    assert [record["samples"] for record in records] == [8, 8, 8, 800, 800]
    assert records[-1]["batches"][0] == pytest.approx(4 * records[-1]["batches"][1], rel=0.1)
    assert {record["round_target"] for record in fleet.of_kind("step") if record["round"] < 3} == {8}
    assert set(used(fleet).values()) == {1}


def test_worker_that_slows_down_in_mid_round_is_given_less() -> None:
    def slowing(now: float) -> float:
        return 0.1 if now < 30 else 0.4

    fleet = fleet_of(0.1, slowing, slices=slices_of(40, 256), update_rounds=4, samples=1600).run()
    hit = next(record for record in fleet.of_kind("round") if record["elapsed_s"] > 30)
    assert hit["idle_fraction"] < 0.1 and hit["batches"][1] < 0.8 * hit["batches"][0]
    assert any(note["kind"] == "correction" and note["round"] == hit["round"] for note in fleet.notes)
    assert set(used(fleet).values()) == {1}


def test_lost_worker_leaves_its_share_to_the_others() -> None:
    fleet = fleet_of(0.1, 0.1, 0.1, faults=FIRST_ONLY, slices=slices_of(20, 256), update_rounds=4, samples=800)
    fleet.later(5.0, lambda: fleet.kill(1))
    fleet.run()
    assert fleet.error is None
    first = fleet.of_kind("round")[0]
    assert set(first["batches"]) == {0, 2} and first["samples"] >= 800
    assert set(used(fleet).values()) == {1}


def test_loss_of_too_many_workers_ends_the_run_with_a_capacity_error() -> None:
    fleet = fleet_of(0.1, 0.1, faults=FIRST_ONLY, samples=256, resources={"num_workers": 2, "min_workers": 2})
    fleet.later(1.0, lambda: fleet.kill(0))
    fleet.run()
    assert isinstance(fleet.error, CapacityError)


def test_start_deadline_with_a_missing_worker_goes_on_without_it() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=4, samples=256)
    tell = fleet.tell
    fleet.tell = lambda event: None if getattr(getattr(event, "source", None), "worker", None) == 1 else tell(event)  # type: ignore[method-assign]
    fleet.run()
    assert fleet.error is None
    assert all(set(record["batches"]) == {0} for record in fleet.of_kind("round"))


def test_rejected_delta_leaves_its_samples_for_later() -> None:
    def poisoned(delta: Delta) -> str | None:
        return "non-finite values" if delta.source.worker == 1 and delta.round == 1 else None

    fleet = fleet_of(
        0.1, 0.1, faults=Faults(reject=poisoned), slices=slices_of(6, 64), update_rounds=5, samples=256
    ).run()
    assert [record["rejected"] for record in fleet.of_kind("round")] == [0, 1, 0, 0, 0]
    assert fleet.of_kind("round")[1]["samples"] == 128
    assert set(used(fleet).values()) == {1}


def test_round_without_any_accepted_delta_ends_the_run() -> None:
    fleet = fleet_of(0.1, 0.1, faults=Faults(reject=lambda _: "non-finite values"), samples=256).run()
    assert isinstance(fleet.error, ConfigError)
    assert "non-finite values" in str(fleet.error)


def test_stale_and_repeated_deltas_change_nothing() -> None:
    fleet = fleet_of(0.1, 0.1, update_rounds=4, samples=256)
    delta = Delta(Source("virtual", 0, 10_001), 7, (), 4, 4, 4, 1, 1.0, 1, 8, 1.0, 0.0)
    fleet.later(2.0, lambda: fleet.tell(delta))
    fleet.later(2.1, lambda: fleet.tell(Delta(Source("virtual", 0, 9), 0, (), 4, 4, 4, 1, 1.0, 1, 8, 1.0, 0.0)))
    calm = fleet_of(0.1, 0.1, update_rounds=4, samples=256).run()
    fleet.run()
    assert sum(note["kind"] == "stale" for note in fleet.notes) == 2
    assert fleet.persisted == calm.persisted


def test_quorum_closes_the_round_after_the_grace_time() -> None:
    def stuck(now: float) -> float:
        return 0.1 if now < 15 else 1e6

    sync = {"quorum": 2, "grace_s": 3.0}
    fleet = fleet_of(0.1, 0.1, stuck, slices=slices_of(30, 64), samples=256, sync=sync).run()
    assert fleet.error is None
    assert max(record["time_s"] for record in fleet.of_kind("round")) < 10


def test_reduce_lists_workers_in_order_whoever_came_first() -> None:
    fleet = fleet_of(0.3, 0.2, 0.1, update_rounds=2, samples=256).run()
    assert all([source.worker for source in reduce.sources] == [0, 1, 2] for reduce in fleet.reduces)


def test_validation_split_is_shared_out_whole_and_by_speed() -> None:
    fleet = fleet_of(0.1, 0.3, slices=slices_of(20, 64, 3), update_rounds=3, samples=256)
    plans = [command for _, command in fleet.run().commanded(c.Assign) if command.plan.evaluate]
    final = {command.worker: sum(span.samples for span in command.plan.evaluate) for command in plans[-2:]}
    assert sum(final.values()) == 192 and final[0] > 2 * final[1]


def test_samples_of_a_worker_lost_while_its_round_is_reduced_come_back() -> None:
    sync = {"quorum": 1, "grace_s": 0.5}
    fleet = fleet_of(0.05, 3.0, slices=slices_of(4, 64), update_rounds=8, samples=128, sync=sync)
    fleet.on(c.Reduce, lambda: fleet.kill(1))
    fleet.run()
    assert fleet.error is None
    assert set(used(fleet).values()) == {1}
    assert fleet.persisted[-1].epoch >= 2


def test_worker_too_slow_for_a_batch_is_tried_again() -> None:
    def recovering(now: float) -> float:
        return 60.0 if now < 70 else 0.1

    fleet = fleet_of(0.1, recovering, slices=slices_of(40, 64), update_rounds=12, samples=1600).run()
    batches = [record["batches"].get(1, 0) for record in fleet.of_kind("round")]
    assert batches[1] == 0 and batches[-1] > 150


def test_silent_worker_is_taken_for_a_slow_one_before_it_reports() -> None:
    fleet = fleet_of(0.1, 10.0, slices=slices_of(40, 64), update_rounds=2, samples=1600).run()
    first = fleet.of_kind("round")[0]
    assert first["batches"][1] <= 5 and first["time_s"] < 50
