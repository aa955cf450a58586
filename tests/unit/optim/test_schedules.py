"""Learning rates over the inner steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hypha_ray.config.schema import Job
from hypha_ray.config.training import InnerOptimizer
from hypha_ray.errors import ConfigError
from hypha_ray.optim.schedules import build_schedule, check_schedule, inner_steps, position, steps_before
from hypha_ray.types import Plan


def rates(steps: int, total: int | None = None, **fields: Any) -> list[float]:
    """Rate of each step of an SGD whose peak is 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, InnerOptimizer(**fields), total)
    shown = []
    for _ in range(steps):
        shown.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return shown


def cosine(step: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step))


CURVES: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({}, lambda step: 1.0),
    "linear": ({}, lambda step: max(0.0, 1 - step / 20)),
    "linear-with-warmup": ({"warmup_steps": 4}, lambda step: step / 4 if step < 4 else max(0.0, (20 - step) / 16)),
    "cosine-with-warmup": (
        {"warmup_steps": 4},
        lambda step: step / 4 if step < 4 else cosine((min(step, 20) - 4) / 16),
    ),
    "wsd": (
        {"warmup_steps": 4, "decay_steps": 10},
        lambda step: step / 4 if step < 4 else 1.0 if step < 10 else cosine((min(step, 20) - 10) / 10),
    ),
}


@pytest.mark.parametrize("name", CURVES)
def test_schedule_follows_its_curve_and_stays_at_its_end(name: str) -> None:
    fields, curve = CURVES[name]
    assert rates(30, 20, schedule=name, **fields) == pytest.approx([curve(step) for step in range(30)], abs=1e-12)


def test_schedule_total_steps_of_the_job_file_comes_first() -> None:
    assert rates(3, 1000, schedule="linear", total_steps=4) == [1.0, 0.75, 0.5]


def test_schedule_wsd_decays_over_the_last_fifth_by_default() -> None:
    shown = rates(100, 100, schedule="wsd")
    assert shown[80] == 1.0 and shown[81] < 1.0 and shown[90] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("fields", "total", "complaint"),
    [
        ({"schedule": "linear"}, None, "'linear' needs total_steps"),
        ({"schedule": "wsd"}, None, "'wsd' needs total_steps"),
        ({"schedule": "constant", "warmup_steps": 3}, 9, "'constant' has no warm-up — got warmup_steps = 3"),
        ({"schedule": "linear", "warmup_steps": 3}, 9, "'linear' has no warm-up"),
        ({"schedule": "cosine-with-warmup", "decay_steps": 3}, 9, "'cosine-with-warmup' has no decay_steps"),
        ({"schedule": "cosine-with-warmup", "warmup_steps": 10}, 9, "got 10 steps, allowed at most 9"),
        ({"schedule": "wsd", "warmup_steps": 6, "decay_steps": 4}, 9, "got 10 steps, allowed at most 9"),
    ],
)
def test_schedule_missing_or_contradictory_value_is_a_config_error(
    fields: dict[str, Any], total: int | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_schedule(InnerOptimizer(**fields), total)
    with pytest.raises(ConfigError, match=complaint):
        rates(1, total, **fields)


@pytest.mark.parametrize("fields", [{}, {"schedule": "wsd", "warmup_steps": 6, "decay_steps": 3, "total_steps": 9}])
def test_check_schedule_sound_values_pass(fields: dict[str, Any]) -> None:
    check_schedule(InnerOptimizer(**fields))


def test_rounds_of_the_warmup_are_a_step_of_the_schedule_each() -> None:
    rounds = {"update_rounds": 5, "warmup_rounds": 3, "samples_between_updates": 80, "max_batch_size": 4}
    job = Job.model_validate({"rounds": rounds})
    assert [steps_before(job, number) for number in range(6)] == [0, 1, 2, 3, 13, 23]
    assert inner_steps(job) == 23
    plans = (Plan(2, 0, (), 4), Plan(3, 0, (), 4))
    assert [position(job, plan, done) for plan in plans for done in (0, 0.5)] == [2, 2.5, 3, 8]


@pytest.mark.parametrize("name", ["linear", "linear-with-warmup", "cosine-with-warmup", "wsd"])
def test_schedule_with_a_least_rate_ends_there_and_warms_up_as_ever(name: str) -> None:
    warmup = 0 if name == "linear" else 10
    shown, plain = (rates(60, 50, schedule=name, warmup_steps=warmup, min_lr_rate=floor) for floor in (0.25, 0.0))
    assert shown[: warmup + 1] == plain[: warmup + 1] and max(shown) == 1.0
    assert shown[50:] == pytest.approx([0.25] * 10)
    assert shown[45] == pytest.approx(0.25 + 0.75 * plain[45])
