"""A store that is slower than training, on a virtual clock: rounds wait for it, and nothing piles up."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.fleet import Faults, Fleet, done, fleet_of

AHEAD = 4
STRATEGIES: list[dict[str, Any]] = [{"strategy": "diloco"}, {"strategy": "sync"}, {"strategy": "async"}]


def slow(*speeds: float, commit_s: float, update_rounds: int = 12, **tables: Any) -> Fleet:
    faults = Faults(commit_s=lambda round: commit_s)
    return done(fleet_of(*speeds, faults=faults, update_rounds=update_rounds, samples=40, **tables))


def problems(fleet: Fleet) -> list[str]:
    return [note["text"] for note in fleet.noted("problem")]


def begun(fleet: Fleet) -> dict[int, float]:
    """When each round was first planned."""
    times: dict[int, float] = {}
    for note in fleet.noted("plan"):
        times.setdefault(note["round"], note["monotonic_s"])
    return times


@pytest.mark.parametrize("sync", STRATEGIES, ids=str)
def test_round_begins_once_all_but_the_last_four_are_committed(sync: dict[str, Any]) -> None:
    fleet = slow(0.05, 0.05, commit_s=3.0, sync=sync)
    committed = {round: at for at, round in fleet.commits}
    starts = begun(fleet)
    assert all(starts[number + AHEAD] >= at for number, at in committed.items() if number + AHEAD in starts)
    waiting = [
        sum(commit > at and number < round for number, commit in committed.items()) for round, at in starts.items()
    ]
    assert max(waiting) == AHEAD - 1, "training stops earlier than it has to"
    assert not fleet.noted("loss"), "a worker is given up that waits for the store"


def test_store_that_keeps_up_delays_nothing() -> None:
    quick, quicker = slow(0.1, 0.1, commit_s=0.5), slow(0.1, 0.1, commit_s=0.0)
    assert begun(quick) == begun(quicker) and not problems(quick)


def test_store_that_hangs_for_long_is_told_of_once() -> None:
    faults = Faults(commit_s=lambda round: 100.0 if round == 2 else 0.1)
    fleet = done(fleet_of(0.1, 0.1, faults=faults, update_rounds=8, samples=40))
    (text,) = problems(fleet)
    assert text == "training waits for the store, which is 4 rounds behind: is the disk slow?"
    assert not problems(slow(0.05, 0.05, commit_s=3.0)), "a slow one is nothing to worry about"
