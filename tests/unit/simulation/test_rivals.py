"""Models of other ways to train: against formulas' brute-force optimum, an event simulation, and times by hand."""

from __future__ import annotations

import math
import random

import pytest

from hypha_ray.simulation.rivals import (
    MachineFailure,
    RivalCosts,
    daly_interval,
    ddp_goodput,
    elastic_goodput,
    mean_time_between,
    rivals_goodput,
    torchft_goodput,
    young_interval,
)

COSTS = RivalCosts(checkpoint_s=10.0, restart_s=60.0, reload_s=20.0, step_s=2.0, reconfigure_s=5.0, resize_s=60.0)


def failures_of(seed: int, machines: int, mean_s: float, horizon_s: float, down_s: float = 0.0) -> list[MachineFailure]:
    rng = random.Random(seed)
    failures = []
    now = rng.expovariate(1 / mean_s)
    while now < horizon_s:
        failures.append(MachineFailure(now, rng.randrange(machines), rng.expovariate(1 / down_s) if down_s else 0.0))
        now += rng.expovariate(1 / mean_s)
    return failures


# ── intervals of checkpoints ──────────────────────────────────────────────────────────────────────────────────────────


def expected_goodput(interval_s: float, checkpoint_s: float, mean_s: float, recovery_s: float = 30.0) -> float:
    """Exact for exponential failures, Daly 2006, equation 20: they may strike in checkpoints and recoveries, too."""
    wall_s = mean_s * math.exp(recovery_s / mean_s) * math.expm1((interval_s + checkpoint_s) / mean_s)
    return interval_s / wall_s


def best_interval(checkpoint_s: float, mean_s: float) -> float:
    """Brute force, in steps of a thousandth."""
    candidates = [mean_s * 1.001**step / 1000 for step in range(9000)]
    return max(candidates, key=lambda interval_s: expected_goodput(interval_s, checkpoint_s, mean_s))


@pytest.mark.parametrize("mean_s", [100.0, 600.0, 3600.0, 86400.0])
@pytest.mark.parametrize("checkpoint_s", [1.0, 10.0, 60.0])
def test_daly_interval_is_nearly_the_best_of_all(checkpoint_s: float, mean_s: float) -> None:
    best_s = best_interval(checkpoint_s, mean_s)
    daly_s = daly_interval(checkpoint_s, mean_s)
    assert daly_s == pytest.approx(best_s, rel=0.02)
    goodput = expected_goodput(daly_s, checkpoint_s, mean_s)
    assert goodput >= 0.9999 * expected_goodput(best_s, checkpoint_s, mean_s)


@pytest.mark.parametrize("checkpoint_s", [1.0, 10.0, 60.0])
def test_young_interval_is_nearly_the_best_when_failures_are_rare(checkpoint_s: float) -> None:
    mean_s = 1000 * checkpoint_s
    best_s = best_interval(checkpoint_s, mean_s)
    young_s = young_interval(checkpoint_s, mean_s)
    assert young_s == pytest.approx(best_s, rel=0.05)
    assert expected_goodput(young_s, checkpoint_s, mean_s) >= 0.999 * expected_goodput(best_s, checkpoint_s, mean_s)


def test_daly_interval_of_checkpoints_longer_than_two_failures_is_their_distance() -> None:
    assert daly_interval(200.0, 100.0) == 100.0
    assert daly_interval(10.0, math.inf) == math.inf


# ── DDP ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def stepped_ddp(
    failures: list[MachineFailure], machines: int, horizon_s: int, costs: RivalCosts, interval_s: int
) -> float:
    """Goodput by the second: a state and a countdown, of failures at whole seconds."""
    by_second: dict[int, list[MachineFailure]] = {}
    for failure in failures:
        by_second.setdefault(int(failure.at_s), []).append(failure)
    up_at = [0] * machines
    state = "train"
    left = interval_s
    saved = unsaved = 0
    for second in range(horizon_s):
        if state == "checkpoint" and left == 0:
            saved += unsaved
            unsaved = 0
            state = "train"
            left = interval_s
        for failure in by_second.get(second, []):
            up_at[failure.machine] = max(up_at[failure.machine], second + int(failure.down_s))
            state = "wait"
            unsaved = 0
        if state == "wait" and all(at <= second for at in up_at):
            state = "recover"
            left = int(costs.recovery_s)
        if state == "recover" and left == 0:
            state = "train"
            left = interval_s
        if state == "train" and left == 0:
            state = "checkpoint"
            left = int(costs.checkpoint_s)
        if state == "train":
            unsaved += 1
        if state != "wait":
            left -= 1
    return (saved + unsaved) / horizon_s


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("down_s", [0.0, 50.0])
def test_ddp_is_that_of_an_event_simulation_by_the_second(seed: int, down_s: float) -> None:
    raw = failures_of(seed, 7, 150.0, 20_000.0, down_s)
    failures = [MachineFailure(float(int(one.at_s)), one.machine, float(int(one.down_s))) for one in raw]
    goodput = ddp_goodput(failures, 7, 20_000.0, COSTS, 45.0)
    assert 0.05 < goodput < 0.9
    assert goodput == pytest.approx(stepped_ddp(failures, 7, 20_000, COSTS, 45))


def test_ddp_of_many_failures_is_the_expected_goodput() -> None:
    failures = failures_of(3, 1000, 300.0, 3e6)
    interval_s = daly_interval(COSTS.checkpoint_s, 300.0)
    expected = expected_goodput(interval_s, COSTS.checkpoint_s, 300.0, COSTS.recovery_s)
    assert ddp_goodput(failures, 1000, 3e6, COSTS, interval_s) == pytest.approx(expected, rel=0.03)


# ── by hand ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_model_without_a_failure_loses_nothing() -> None:
    assert set(rivals_goodput([], 4, 1000.0, COSTS).values()) == {1.0}
    assert mean_time_between([], 1000.0) == math.inf


def test_one_failure_of_ddp_by_hand() -> None:
    # It trains 100 s and pauses 10 s in turn; dies at 250 s with 200 s saved, waits 40 s, recovers in 80 s. 630 s are
    # left: 5 cycles and 80 s.
    failure = MachineFailure(250.0, 2, 40.0)
    assert ddp_goodput([failure], 4, 1000.0, COSTS, 100.0) == pytest.approx((200 + 500 + 80) / 1000)


def test_one_failure_of_an_elastic_group_by_hand() -> None:
    # Four machines save 200 s by 250 s; three train from 330 s, and look for a fourth every 60 s: it is back at 450 s,
    # so they stop at 450 s with 100 s saved of 120 s. Four train from 530 s to 1000 s: 470 s are 4 cycles and 30 s.
    failure = MachineFailure(250.0, 2, 200.0)
    wanted = 4 * 200 + 3 * 100 + 4 * (400 + 30)
    assert elastic_goodput([failure], 4, 1000.0, COSTS, 100.0) == pytest.approx(wanted / 4000)


def test_failure_of_a_machine_that_is_down_does_not_stop_an_elastic_group() -> None:
    once = [MachineFailure(250.0, 2, 2000.0)]
    assert elastic_goodput([*once, MachineFailure(400.0, 2)], 4, 1000.0, COSTS, 100.0) == pytest.approx(
        elastic_goodput(once, 4, 1000.0, COSTS, 100.0)
    )


def test_elastic_group_that_waits_for_its_only_machine_goes_on_with_it() -> None:
    for tenths in range(1, 200):
        down_s = tenths / 10
        goodput = elastic_goodput([MachineFailure(100.0, 0, down_s)], 1, 1000.0, COSTS, float("inf"))
        assert goodput == pytest.approx((1000 - 100 - down_s - 80) / 1000)


def test_one_failure_of_torchft_by_hand() -> None:
    # All pause for 5 s and lose half a step of 2 s; the machine is back after 40 s and recovers in 80 s, then all pause
    # for 5 s once more.
    failure = MachineFailure(250.0, 2, 40.0)
    wanted = 4 * 250 + 3 * (370 - 256) + 4 * (1000 - 375)
    assert torchft_goodput([failure], 4, 1000.0, COSTS) == pytest.approx(wanted / 4000)


def test_machine_that_fails_before_it_joined_again_costs_torchft_no_second_pause() -> None:
    failures = [MachineFailure(250.0, 2, 40.0), MachineFailure(300.0, 2, 0.0)]
    wanted = 4 * 250 + 3 * (380 - 256) + 4 * (1000 - 385)
    assert torchft_goodput(failures, 4, 1000.0, COSTS) == pytest.approx(wanted / 4000)


@pytest.mark.parametrize("seed", range(5))
def test_longer_restarts_and_more_failures_never_help(seed: int) -> None:
    failures = failures_of(seed, 50, 200.0, 20_000.0, 100.0)
    slow = RivalCosts(restart_s=600.0)
    for name, goodput in rivals_goodput(failures, 50, 20_000.0, RivalCosts(restart_s=30.0)).items():
        assert 0 <= rivals_goodput(failures, 50, 20_000.0, slow)[name] <= goodput < 1, name
