"""Payloads that get lost with their nodes, and deltas that are rejected: who is blamed for what, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.types import Delta
from tests.support.fleet import Faults, Fleet, done, fleet_of, past_of, slices_of, used

BAD = "non-finite values"
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "diloco"},
    {"strategy": "sync"},
    {"strategy": "async"},
]


def faults(reason: str, *rounds: int, worker: int = 1) -> Faults:
    """A worker's deltas of these rounds aren't merged."""
    return Faults(reject=lambda delta: reason if delta.source.worker == worker and delta.round in rounds else None)


def after(count: int, reason: Callable[[Delta], str | None]) -> Faults:
    """The first deltas are good; what becomes of those after them."""
    seen: list[Delta] = []

    def reject(delta: Delta) -> str | None:
        seen.append(delta)
        return reason(delta) if len(seen) > count else None

    return Faults(reject=reject)


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_worker_whose_payloads_are_lost_again_and_again_is_not_excluded(sync: dict[str, Any]) -> None:
    ill_fated = Faults(reject=lambda delta: LOST if delta.source.worker == 1 and delta.round % 2 else None)
    fleet = done(fleet_of(0.1, 0.1, 0.1, faults=ill_fated, update_rounds=12, sync={**sync, "strikes": 2}))
    assert [note["worker"] for note in fleet.noted("reject")].count(1) >= 3
    assert not fleet.noted("exclude") and not fleet.noted("loss")
    assert fleet.persisted[-1].state["workers"]["1"].get("strikes", 0) == 0


@pytest.mark.parametrize("sync", [one for one in STRATEGIES if one.get("strategy") != "async"], ids=str)
def test_round_whose_payloads_are_all_lost_is_trained_again_from_the_last_commit(sync: dict[str, Any]) -> None:
    fleet = fleet_of(0.1, 0.1, faults=after(4, lambda delta: LOST), update_rounds=4, sync=sync).run()
    error = fleet.error
    assert getattr(error, "code", None) == "NET012" and getattr(error, "exit_code", None) == 75
    assert LOST in str(error) and "diverged" not in str(error)
    rest = Fleet(fleet.job, [0.1, 0.1], slices_of(20, 64), past=past_of(fleet.persisted))
    done(rest)
    rest.persisted[:0] = fleet.persisted
    assert [one.round for one in rest.persisted] == [0, 1, 2, 3] and set(used(rest).values()) == {1}


def test_without_a_barrier_lost_payloads_are_trained_again_at_once() -> None:
    lost = after(4, lambda delta: LOST if delta.source.incarnation == 10_001 and delta.round in range(4, 9) else None)
    fleet = done(fleet_of(0.1, 0.1, faults=lost, update_rounds=6, sync={"strategy": "async"}))
    assert len(fleet.noted("reject")) >= 4 and not fleet.noted("exclude")


def test_round_of_a_lost_and_of_a_bad_payload_is_not_called_divergence() -> None:
    mixed = after(4, lambda delta: LOST if delta.source.worker else BAD)
    fleet = fleet_of(0.1, 0.1, faults=mixed, update_rounds=4).run()
    assert getattr(fleet.error, "code", None) == "NET012"


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_run_whose_every_delta_is_bad_has_diverged(sync: dict[str, Any]) -> None:
    fleet = fleet_of(0.1, 0.1, faults=after(4, lambda delta: BAD), update_rounds=8, sync=sync).run()
    error = fleet.error
    assert getattr(error, "code", None) == "TRN001" and BAD in str(error)


def test_replay_without_one_payload_is_trained_again() -> None:
    tables = {"run": {"name": "virtual", "mode": "replay"}, "update_rounds": 4, "samples": 120}
    calm = done(fleet_of(0.1, 0.2, **tables))
    fleet = fleet_of(0.1, 0.2, faults=faults(LOST, 2), **tables).run()
    assert getattr(fleet.error, "code", None) == "NET012"
    rest = done(Fleet(fleet.job, [0.1, 0.2], slices_of(20, 64), past=past_of(fleet.persisted)))
    assert [one.spans for one in fleet.persisted + rest.persisted] == [one.spans for one in calm.persisted]


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_every_accepted_delta_takes_a_strike_back(sync: dict[str, Any]) -> None:
    count = {0: 0, 1: 0, 2: 0}

    def every_third(delta: Delta) -> str | None:
        count[delta.source.worker] += 1
        return BAD if delta.source.worker == 1 and count[1] % 3 == 0 else None

    fleet = done(
        fleet_of(0.1, 0.1, 0.1, faults=Faults(reject=every_third), update_rounds=20, sync={**sync, "strikes": 2})
    )
    assert len(fleet.noted("reject")) >= 4 and not fleet.noted("exclude")


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_bad_deltas_in_a_row_exclude_their_worker(sync: dict[str, Any]) -> None:
    bad = after(6, lambda delta: BAD if delta.source.worker == 1 else None)
    fleet = done(fleet_of(0.1, 0.1, 0.1, faults=bad, update_rounds=12, sync={**sync, "strikes": 3}))
    assert [note["worker"] for note in fleet.noted("exclude")] == [1] and len(fleet.noted("reject")) == 3


def test_strikes_that_were_taken_back_are_not_carried_over() -> None:
    fleet = done(fleet_of(0.1, 0.1, faults=faults(BAD, 0, 1), update_rounds=4))
    assert [one.state["workers"]["1"].get("strikes", 0) for one in fleet.persisted] == [1, 2, 1, 0]
