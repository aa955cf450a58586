"""Inner optimizers and schedules that users bring."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch

from hypha_ray.plugins import create, find, options_of

_STEPS = 10
"""Length of a trial of a schedule, in steps."""


def build_own(
    name: str, options: Mapping[str, Any] | None, parameters: Any, table: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Build a user's optimizer, with the settings of `table` that its constructor takes, and its own options.

    Raises:
        ConfigError: the class can't be loaded, or an option is wrong.

    """
    optimizer_type = find("inner_optimizers", name)
    arguments = inspect.signature(optimizer_type).parameters
    settings = {key: value for key, value in table.items() if key in arguments}
    checked = options_of("inner_optimizers", name, optimizer_type, options)
    own_options = {} if checked is None else checked.model_dump()
    optimizer: torch.optim.Optimizer = optimizer_type(parameters, **settings, **own_options)
    return optimizer


def try_optimizer(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a user's optimizer for two steps.

    Raises:
        ValueError: the class is no optimizer of torch, or the parameter becomes infinite or NaN.

    """
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    table = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0}
    optimizer = build_own(name, options, [parameter], table)
    if not isinstance(optimizer, torch.optim.Optimizer):
        class_name = type(optimizer).__name__
        raise ValueError(f"a {class_name}, which isn't derived from torch.optim.Optimizer")
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError('a group of parameters without "lr", which schedules set')
    for _ in range(2):
        parameter.grad = torch.full((2, 3), 0.5)
        optimizer.step()
    if not torch.isfinite(parameter).all():
        raise ValueError("steps on finite gradients give values that aren't")


def own_factor(name: str, options: Mapping[str, Any] | None, total: int, warmup: int) -> Any:
    """Return a function of the step for the factor of the peak learning rate, by a user's schedule.

    Raises:
        ConfigError: the schedule can't be loaded.

    """
    schedule = create("schedules", name, options)

    def factor(step: int) -> float:
        value = float(schedule(min(step, total), total, warmup))
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} gave the factor {value} at step {step} of {total}")
        return value

    return factor


def try_schedule(name: str, options: Mapping[str, Any] | None) -> None:
    """Try a user's schedule for a few steps.

    Raises:
        ValueError: a factor is negative, or isn't finite.

    """
    factor = own_factor(name, options, _STEPS, 2)
    for step in range(_STEPS + 1):
        factor(step)
