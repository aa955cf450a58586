"""Early stopping: a run ends after the rounds without a better evaluation that its job allows, and not before."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hypha_ray.config.schema import Rounds
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.failures import EvaluationPatience
from tests.support.fleet import Faults, Fleet, done, fleet_of, past_of

NAN = math.nan


def trained(losses: list[float], speeds: tuple[float, ...] = (0.1, 0.2), **tables: Any) -> Fleet:
    """A run whose weights after round n have the n-th loss."""
    faults = Faults(val_loss=lambda round: losses[round - 1])
    return done(fleet_of(*speeds, faults=faults, samples=120, update_rounds=len(losses), **tables))


def committed(fleet: Fleet) -> list[int]:
    return [persist.round for persist in fleet.persisted]


def evaluated(fleet: Fleet) -> list[int]:
    return [record["round"] for record in fleet.of_kind("eval")]


@pytest.mark.parametrize(
    ("losses", "rounds", "last", "reason"),
    [
        ([5, 4, 4.5, 4.25, 1, 1], {"patience": 2}, 3, "no better val_loss than 4 after round 2, in 2 more rounds"),
        ([5, 5, 1, 1, 1], {"patience": 1}, 1, "no better val_loss than 5 after round 1, in 1 more round"),
        ([5, NAN, 6, 4, 1], {"patience": 2}, 2, "no better val_loss than 5 after round 1, in 2 more rounds"),
        ([NAN, NAN, NAN, NAN], {"patience": 2}, 1, "no finite val_loss in 2 rounds"),
        ([5, 4.75, 4.5, 4.25, 4], {"patience": 2, "min_delta": 0.5}, None, None),
        (
            [5, 4.75, 4.6, 1, 1],
            {"patience": 2, "min_delta": 0.5},
            2,
            "no better val_loss than 5 after round 1, in 2 more rounds",
        ),
        (
            [9, 5, 9, 6, 9, 1, 1],
            {"patience": 2, "evaluate_every": 2},
            3,
            "no better val_loss than 5 after round 2, in 2 more rounds",
        ),
        ([5, 4, 3, 2, 1], {"patience": 1}, None, None),
        ([5, 4, 4, 4], {"patience": 2}, None, None),
        ([5, 6, 7, 8], {}, None, None),
    ],
)
def test_run_ends_after_the_rounds_without_a_better_evaluation(
    losses: list[float], rounds: dict[str, Any], last: int | None, reason: str | None
) -> None:
    fleet = trained(losses, rounds=rounds)
    assert committed(fleet) == list(range(len(losses) if last is None else last + 1))
    assert [note["reason"] for note in fleet.noted("stop")] == ([] if reason is None else [reason])
    assert [record["round"] for record in fleet.of_kind("round")] == committed(fleet)
    assert evaluated(fleet)[-1] == committed(fleet)[-1], "the run's last weights are evaluated"


@pytest.mark.parametrize(
    "sync",
    [
        {"strategy": "async"},
        {"strategy": "sync"},
        {"fragments": 2},
        {"fragments": 2, "in_flight": 2},
        {"delay_steps": 2},
    ],
)
def test_every_strategy_ends_early(sync: dict[str, Any]) -> None:
    faults = Faults(val_loss=lambda round: 4.0)
    rounds = {"patience": 3}
    fleet = done(fleet_of(0.1, 0.2, faults=faults, samples=120, update_rounds=20, rounds=rounds, sync=sync))
    assert [note["reason"] for note in fleet.noted("stop")] == [
        "no better val_loss than 4 after round 1, in 3 more rounds"
    ]
    assert evaluated(fleet) == [0, 1, 2, 3]
    assert [record["round"] for record in fleet.of_kind("round")] == committed(fleet)
    assert 4 <= len(committed(fleet)) <= 6


def test_evaluations_before_an_interruption_count() -> None:
    losses = [5.0, 4.0, 4.5, 4.5, 4.5, 1.0]
    calm = trained(losses, rounds={"patience": 3})
    assert committed(calm) == [0, 1, 2, 3, 4]
    for rounds in (1, 2, 3, 4):
        told = tuple(record for record in calm.of_kind("eval") if record["round"] < rounds)
        for known in (told, told[:-1]):  # Killed after or before the record of its last evaluation.
            faults = Faults(val_loss=lambda round: losses[round - 1])
            past = past_of(calm.persisted[:rounds], evaluations=known)
            tables: dict[str, Any] = {"samples": 120, "update_rounds": len(losses), "rounds": {"patience": 3}}
            fleet = fleet_of(0.1, 0.2, faults=faults, past=past, **tables).run()
            assert fleet.error is None
            assert committed(fleet) == list(range(rounds, 5))
            assert fleet.noted("stop")[0]["reason"] == calm.noted("stop")[0]["reason"]


@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_run_that_was_killed_between_its_last_evaluation_and_its_end_trains_no_further(strategy: str) -> None:
    tables: dict[str, Any] = {"rounds": {"patience": 2}, "sync": {"strategy": strategy}}
    calm = trained([5.0, 6.0, 7.0, 8.0], **tables)
    past = past_of(calm.persisted, evaluations=tuple(calm.of_kind("eval")))
    fleet = fleet_of(0.1, 0.2, past=past, samples=120, update_rounds=4, **tables).run()
    assert fleet.error is None and committed(fleet) == []
    assert fleet.noted("stop")[0]["reason"] == calm.noted("stop")[0]["reason"]


def test_lost_worker_changes_nothing_of_the_count() -> None:
    losses = [5.0, 4.0, 4.5, 4.5, 4.5, 4.5]
    faults = Faults(val_loss=lambda round: losses[round - 1], evaluate_s=0.2)
    fleet = fleet_of(0.1, 0.2, 0.1, faults=faults, samples=120, update_rounds=6, rounds={"patience": 2})
    fleet.on(c.Assign, lambda: fleet.kill(1), 0.1, lambda command: command.plan.round == 2 and command.worker == 1)
    fleet.on(c.Assign, lambda: fleet.kill(2), 0.1, lambda command: command.plan.round == 4 and command.worker == 2)
    done(fleet)
    assert committed(fleet) == [0, 1, 2, 3] and fleet.noted("loss") and len(fleet.noted("stop")) == 1


def test_reward_is_the_better_the_greater() -> None:
    patience = EvaluationPatience(Rounds(patience=2, min_delta=0.1))
    for round, reward in enumerate([0.2, 0.5, 0.55]):
        patience.take({"round": round, "reward": reward, "val_loss": 9.0 - round})
    assert patience.exhausted is None
    patience.take({"round": 3, "reward": 0.4, "val_loss": 0.0})
    assert patience.exhausted == "no better reward than 0.5 after round 2, in 2 more rounds"
