"""Runs that end by `rounds.epochs`: every sample is in exactly so many commits, whatever goes wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hypha_ray.config.schema import beside_largest, rounds_for
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.round_sizes import RoundSamples, fitted
from hypha_ray.types import SLICES_PER_DATASET, Delta, SliceInfo
from tests.support.epochs import EpochWalk, train_samples, uses, with_epochs
from tests.support.fleet import FIRST_ONLY, Faults, Fleet, job_of, past_of, slices_of

SLICES = slices_of(train=7, samples=28, validation=1)
"""196 samples."""


def fleet_of(
    *speeds: float,
    epochs: int = 3,
    samples: int = 40,
    batch: int = 4,
    faults: Faults | None = None,
    past: Any = None,
    slices: list[SliceInfo] = SLICES,
    rounds: dict[str, int] | None = None,
    **tables: dict[str, Any],
) -> Fleet:
    sizes = {"samples_between_updates": samples, "max_batch_size": batch, **(rounds or {})}
    tables["resources"] = {"num_workers": len(speeds), **tables.get("resources", {})}
    job = with_epochs(job_of(rounds=sizes, **tables), slices, epochs)
    return Fleet(job, list(speeds), slices, faults, past)


def exact(fleet: Fleet, epochs: int = 3) -> Fleet:
    """Run it to an end at which every sample has been used that often."""
    fleet.run()
    assert fleet.error is None
    assert_exact(fleet.persisted, epochs)
    return fleet


def assert_exact(persisted: list[c.Persist], epochs: int, slices: list[SliceInfo] = SLICES) -> None:
    counts = uses(persisted)
    assert len(counts) == train_samples(slices)
    assert set(counts.values()) == {epochs}
    assert [persist.round for persist in persisted] == list(range(len(persisted)))
    assert [bool(persist.state.get("last")) for persist in persisted].index(True) == len(persisted) - 1
    assert persisted[-1].epoch == epochs and not persisted[-1].ahead


def samples_of_rounds(fleet: Fleet) -> list[int]:
    return [sum(part.samples for part in persist.verdict.accepted) for persist in fleet.persisted]


STRATEGIES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "equal batches": {"dynamic_local_steps": False},
    "fragments in turn": {"fragments": 3},
    "delayed": {"fragments": 2, "delay_steps": 2},
    "in flight": {"fragments": 3, "in_flight": 3},
    "in flight and delayed": {"fragments": 2, "in_flight": 2, "delay_steps": 1},
    "sync": {"strategy": "sync"},
    "quorum": {"quorum": 1, "grace_s": 0.2},
}


@pytest.mark.parametrize("sync", STRATEGIES.values(), ids=STRATEGIES)
def test_run_with_barrier_uses_every_sample_once_an_epoch_in_as_many_rounds_as_planned(sync: dict[str, Any]) -> None:
    # No report comes in mid-round: what a correction takes from a worker can't be in the next round if that has begun.
    fleet = exact(fleet_of(0.1, 0.13, 0.31, sync=sync, worker={"report_every_s": 10.0}))
    records = fleet.of_kind("round")
    samples = samples_of_rounds(fleet)
    if "quorum" in sync:  # What is late isn't in its round.
        assert len(samples) >= 15 and max(samples) <= 80
    else:
        assert [record["rounds"] for record in records] == [15] * 15  # 588 samples, 40 a round.
    if not sync.keys() & {"quorum", "delay_steps"}:
        assert samples == [40] * 14 + [28]
    assert records[-1]["epoch"] == 3
    assert records[-1]["samples_total"] == 588
    assert records[-1]["eta_s"] == 0.0
    assert fleet.of_kind("eval")[-1]["round"] == len(samples) - 1


def test_replay_uses_every_sample_once_an_epoch_and_a_kill_changes_nothing() -> None:
    calm = exact(fleet_of(0.1, 0.3, run={"mode": "replay"}))
    assert samples_of_rounds(calm) == [40] * 14 + [28]
    killed = fleet_of(0.1, 0.3, run={"mode": "replay"})
    killed.on(c.Assign, lambda: killed.kill(1), 0.5, lambda order: order.plan.round == 14 and order.worker == 1)
    exact(killed)
    assert killed.noted("loss")
    assert [persist.spans for persist in killed.persisted] == [persist.spans for persist in calm.persisted]


@pytest.mark.parametrize("period", [None, 1, 5])
def test_asynchronous_run_uses_every_sample_once_an_epoch(period: int | None) -> None:
    fleet = exact(fleet_of(0.1, 0.13, 0.31, sync={"strategy": "async", "period": period}))
    records = fleet.of_kind("round")
    assert records[-1]["rounds"] == len(fleet.persisted) == records[-1]["round"] + 1
    assert fleet.of_kind("eval")[-1]["round"] == len(fleet.persisted) - 1
    last = fleet.reduces[-1].phase
    assert last is not None and last.closes(len(fleet.reduces[-1].sources))
    assert not any(plan.samples == 0 for plan in plans(fleet) if not plan.final)


def plans(fleet: Fleet) -> list[Any]:
    return [command.plan for _, command in fleet.commanded(c.Assign)]


def test_warm_up_rounds_count_with_their_own_samples() -> None:
    fleet = exact(fleet_of(0.1, 0.1, samples=100, rounds={"warmup_rounds": 4}))
    assert samples_of_rounds(fleet) == [8] * 4 + [100] * 5 + [56]


def test_epoch_smaller_than_a_round_ends_in_its_first_round() -> None:
    fleet = exact(fleet_of(0.1, 0.1, epochs=1, samples=1000), epochs=1)
    assert samples_of_rounds(fleet) == [196]


def test_rounds_smaller_than_a_batch_have_short_batches() -> None:
    fleet = exact(fleet_of(0.1, 0.1, epochs=1, samples=9, batch=16), epochs=1)
    assert samples_of_rounds(fleet) == [9] * 21 + [7]


@pytest.mark.parametrize("sync", [{}, {"strategy": "sync"}, {"fragments": 2, "in_flight": 2}, {"strategy": "async"}])
def test_worker_lost_in_the_last_round_leaves_no_sample_unused(sync: dict[str, Any]) -> None:
    fleet = fleet_of(0.1, 0.2, sync=sync, faults=FIRST_ONLY)
    fleet.on(c.Persist, lambda: fleet.kill(1), 0.25, lambda persist: persist.round == 13)
    exact(fleet)
    assert fleet.noted("loss")


@pytest.mark.parametrize("sync", [{}, {"strategy": "sync"}, {"strategy": "async"}, {"fragments": 3, "delay_steps": 1}])
@pytest.mark.parametrize("reason", ["non-finite values", LOST])
def test_delta_rejected_in_the_last_round_is_made_up_by_a_further_round(sync: dict[str, Any], reason: str) -> None:
    rejected: list[Delta] = []

    def reject(delta: Delta) -> str | None:
        if delta.source.worker == 1 and not rejected and len(fleet.persisted) == 14:
            rejected.append(delta)
            return reason
        return None

    fleet = fleet_of(0.1, 0.1, sync=sync, faults=Faults(reject=reject))
    exact(fleet)
    assert rejected
    records = fleet.of_kind("round")
    assert records[-1]["rounds"] == len(fleet.persisted) >= 15
    if "strategy" not in sync:
        assert len(fleet.persisted) == 16


def test_samples_of_a_delta_rejected_early_are_made_up_by_the_next_round() -> None:
    fleet = fleet_of(
        0.1, 0.1, faults=Faults(reject=lambda delta: "bad" if delta.round == delta.source.worker == 1 else None)
    )
    exact(fleet)
    assert samples_of_rounds(fleet) == [40, 20, 60] + [40] * 11 + [28]
    assert len(fleet.persisted) == 15


def test_run_that_is_resumed_goes_on_to_the_same_end() -> None:
    whole = exact(fleet_of(0.1, 0.2))
    for committed in (1, 7, 14):
        past = past_of(whole.persisted[:committed])
        rest = fleet_of(0.1, 0.2, past=past)
        rest.run()
        assert_exact(whole.persisted[:committed] + rest.persisted, 3)


@pytest.mark.parametrize("sync", [{}, {"strategy": "sync"}, {"strategy": "async"}])
def test_finished_run_goes_on_from_three_epochs_to_five(sync: dict[str, Any]) -> None:
    first = exact(fleet_of(0.1, 0.2, sync=sync))
    resumed = fleet_of(0.1, 0.2, epochs=5, sync=sync, past=past_of(first.persisted))
    resumed.run()
    assert resumed.error is None
    before = [replace(persist, state={}) for persist in first.persisted]
    assert_exact(before + resumed.persisted, 5)


def test_finished_run_that_is_resumed_with_no_more_epochs_trains_nothing() -> None:
    first = exact(fleet_of(0.1, 0.2))
    resumed = fleet_of(0.1, 0.2, epochs=2, past=past_of(first.persisted))
    resumed.run()
    assert resumed.error is None and not resumed.persisted


def test_run_that_began_with_rounds_ends_with_epochs() -> None:
    tables: dict[str, Any] = {"rounds": {"update_rounds": 4, "samples_between_updates": 70, "max_batch_size": 4}}
    first = Fleet(job_of(**tables), [0.1, 0.2], SLICES).run()
    resumed = fleet_of(0.1, 0.2, past=past_of(first.persisted))
    resumed.run()
    assert_exact(first.persisted + resumed.persisted, 3)


def test_damaged_slice_is_left_out_and_every_other_sample_has_its_uses() -> None:
    first = exact(fleet_of(0.1, 0.2))
    sound = [info for info in SLICES if info.index != 2]
    past = past_of(first.persisted[:8])
    used = [span for span in past.used["used"] if span[1] != 2]
    job = with_epochs(job_of(rounds={"samples_between_updates": 40, "max_batch_size": 4}), SLICES, 3)
    rest = Fleet(job, [0.1, 0.2], sound, past=replace(past, used={**past.used, "used": used})).run()
    counts = uses(first.persisted[:8] + rest.persisted)
    assert {counts[index, number] for index, number in counts if index != 2} == {3}
    assert len(rest.persisted) == 7  # As many rounds as workers expect, and each has some samples.


# ── mixtures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def mixture_of(*sizes: int) -> list[SliceInfo]:
    slices: list[SliceInfo] = []
    for number, samples in enumerate(sizes):
        first = number * SLICES_PER_DATASET
        slices += [SliceInfo(first + i, f"slice-{i}", "0" * 64, samples // 2, "train") for i in range(2)]
    return slices


@pytest.mark.parametrize("strategy", ["diloco", "async", "sync"])
@pytest.mark.parametrize(("sizes", "weights"), [((200, 30), (0.5, 0.5)), ((60, 200, 20), (1.0, 3.0, 1.0))])
def test_epoch_of_a_mixture_is_the_largest_datasets_and_the_total_is_exact(
    sizes: tuple[int, ...], weights: tuple[float, ...], strategy: str
) -> None:
    slices = mixture_of(*sizes)
    mix = [{"path": f"/data/{number}", "weight": weight} for number, weight in enumerate(weights)]
    largest = sizes.index(max(sizes))
    total = round(2 * 200 * sum(weights) / weights[largest])
    rounds = {"samples_between_updates": 48, "max_batch_size": 7, "epochs": 2}
    job = job_of(rounds=rounds, dataset={"mix": mix}, sync={"strategy": strategy})
    job = job.lasting(rounds_for(job, total))
    fleet = Fleet(job, [0.1, 0.2, 0.25], slices)
    fleet.on(c.Persist, lambda: fleet.kill(2), 0.3, lambda persist: persist.round == 2)
    fleet.run()
    assert fleet.error is None
    counts = uses(fleet.persisted)
    assert sum(counts.values()) == total
    own = [count for (index, _), count in counts.items() if index // SLICES_PER_DATASET == largest]
    assert own == [2] * 200
    for number, weight in enumerate(weights):
        used = sum(count for (index, _), count in counts.items() if index // SLICES_PER_DATASET == number)
        assert abs(used - total * weight / sum(weights)) <= 4


def test_beside_the_largest_dataset_others_have_their_shares() -> None:
    assert beside_largest([200, 30], [0.5, 0.5], 2) == 400
    assert beside_largest([60, 200, 20], [1.0, 3.0, 1.0], 1) == 133
    assert beside_largest([196], [1.0], 3) == 0


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("samples", "first", "rounds"),
    [(588, 0, 18), (588, 3, 15), (1, 0, 1), (0, 5, 0), (16, 0, 2), (17, 0, 3), (40, 9, 1)],
)
def test_number_of_rounds_is_that_of_the_samples(samples: int, first: int, rounds: int) -> None:
    job = job_of(
        rounds={"samples_between_updates": 40, "max_batch_size": 4, "warmup_rounds": 3},
        resources={"num_workers": 2},
    )
    assert rounds_for(job, samples, first) == rounds


def test_each_round_leaves_samples_to_all_later_ones() -> None:
    job = with_epochs(job_of(rounds={"samples_between_updates": 40}, resources={"num_workers": 3}), SLICES, 3)
    length = RoundSamples(job, 0, 588)
    assert [length.target(0, 588), length.target(13, 68), length.target(14, 28)] == [40, 40, 28]
    assert length.target(13, 30) == 3  # Overshot before: the last one is to have its 28 samples if possible.
    assert length.reserve(12, 588) == 6
    assert length.target(14, 100) == 80  # As many again at most; the rest goes to further rounds.
    assert length.target(15, 20) == 20


def test_samples_are_cut_from_the_last_worker_on_and_a_worker_that_is_ahead_keeps_one() -> None:
    assert fitted({0: 8, 1: 8, 2: 8}, {2}, 10) == {0: 8, 1: 1, 2: 1}
    assert fitted({0: 8, 1: 8}, set(), 16) == {0: 8, 1: 8}
    assert fitted({0: 8, 1: 8}, {0, 1}, 1) == {0: 1, 1: 1}


# ── everything that can go wrong ──────────────────────────────────────────────────────────────────────────────────────


def walked(seed: int) -> str:
    """Walk; the books have seen that every sample was used. Returns how the rounds compare with the planned ones."""
    walk = EpochWalk(seed).run()
    view = walk.core.view()
    if view.roster.eligible < view.needed:
        return "without workers"
    assert walk.job.rounds.epochs is not None
    counts = uses(walk.books.log)
    assert len(counts) == train_samples(walk.weather.slices) and set(counts.values()) == {walk.job.rounds.epochs}
    difference = len(walk.books.log) - walk.job.rounds.update_rounds
    assert difference >= 0 or walk.job.sync.strategy == "async", "the last planned round is missing"
    return "more" if difference > 0 else "fewer" if difference else "as planned"


def test_runs_in_some_storms_use_every_sample_once_an_epoch() -> None:
    assert all(walked(seed) for seed in range(12))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(6))
@pytest.mark.long(keep=1)
def test_runs_in_many_storms_use_every_sample_once_an_epoch(block: int) -> None:
    ends = Counter(walked(seed) for seed in range(100 * block, 100 * (block + 1)))
    assert ends["as planned"] > 50 and ends["more"]
