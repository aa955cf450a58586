"""Learning rates over inner steps and over rounds, by the names that a job file uses.

The curves are transformers'. A round may have more inner steps than planned, so past its last step a curve is constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from hypha_ray.config.schema import Job
from hypha_ray.config.training import InnerOptimizer, OuterOptimizer
from hypha_ray.errors import ConfigError, guarded
from hypha_ray.plugins import create
from hypha_ray.types import Plan

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR


def build_schedule(
    optimizer: torch.optim.Optimizer, config: InnerOptimizer, total_steps: int | None = None
) -> LambdaLR:
    """Build a schedule; its `step` is called after each inner step.

    Args:
        optimizer: optimizer whose present learning rates are the peak.
        config: schedule, warm-up and decay; its `total_steps` takes precedence over the argument.
        total_steps: inner steps that the run is planned to have; None: unknown.

    Raises:
        ConfigError: a value is missing, or contradicts another.

    """
    from transformers import optimization as curves

    check_schedule(config, total_steps)
    warmup = config.warmup_steps
    total = config.total_steps or total_steps or 0
    schedule: LambdaLR
    match config.schedule:
        case "constant":
            schedule = curves.get_constant_schedule(optimizer)
        case "linear" | "linear-with-warmup":
            schedule = curves.get_linear_schedule_with_warmup(optimizer, warmup, total)
        case "cosine-with-warmup":
            schedule = curves.get_cosine_schedule_with_warmup(optimizer, warmup, total)
        case "wsd":
            decay = _decay_steps(config, total)
            schedule = curves.get_wsd_schedule(optimizer, warmup, decay, num_training_steps=total)
        case own:
            from torch.optim.lr_scheduler import LambdaLR

            factor = guarded(f"schedule {own}", own_factor(own, config.schedule_options, total, warmup))
            schedule = LambdaLR(optimizer, factor)
    if config.schedule != "constant":
        schedule.lr_lambdas = [_bounded(curve, warmup, total, config.min_lr_rate) for curve in schedule.lr_lambdas]
    return schedule


def own_factor(name: str, options: Mapping[str, Any] | None, total: int, warmup: int) -> Callable[[float], float]:
    """Return a function of the step for the factor of the peak learning rate, by a user's schedule.

    Raises:
        ConfigError: the schedule can't be loaded.

    """
    schedule = create("schedules", name, options)

    def factor(step: float) -> float:
        value = float(schedule(min(step, total), total, warmup))
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} gave the factor {value} at step {step} of {total}")
        return value

    return factor


def steps_before(job: Job, round: float) -> float:
    """Return the nominal steps before a round, as if all workers had the same speed. Schedules use them as time."""
    if job.sync.traits.sends_gradients:
        return round
    warmup_rounds = min(round, job.rounds.warmup_rounds)  # Warm-up rounds have one step each.
    samples_of_step = job.num_workers * job.rounds.max_batch_size
    steps_of_round = -(-job.rounds.samples_between_updates // samples_of_step)
    return warmup_rounds + (round - warmup_rounds) * steps_of_round


def inner_steps(job: Job) -> int:
    """Return the length of the schedule: steps of the whole run, unless the job file sets another number."""
    if job.inner_optimizer.total_steps:
        return job.inner_optimizer.total_steps
    return int(steps_before(job, job.rounds.update_rounds))


def position(job: Job, plan: Plan, done_share: float) -> float:
    """Return the step of the schedule when a fraction `done_share` of a plan's samples is trained on."""
    first_round, last_round = plan.progress or (plan.round, plan.round + 1)
    return steps_before(job, first_round + (last_round - first_round) * done_share)


def rates(job: Job, plan: Plan) -> tuple[float, float]:
    """Return the learning rates at the beginning and at the end of a plan."""
    config = job.inner_optimizer
    if config.schedule == "constant":
        return config.learning_rate, config.learning_rate
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    curves = build_schedule(optimizer, config, inner_steps(job)).lr_lambdas
    (curve,) = cast("list[Callable[[float], float]]", curves)
    first_rate = config.learning_rate * curve(position(job, plan, 0))
    last_rate = config.learning_rate * curve(position(job, plan, 1))
    return first_rate, last_rate


def outer_rate(outer: OuterOptimizer, round: int, rounds: int) -> float:
    """Return η of a round: `learning_rate` in the first of `rounds` rounds, `final_learning_rate` in the last."""
    progress = min(1.0, round / max(1, rounds - 1))
    match outer.schedule:
        case "constant":
            return outer.learning_rate
        case "linear":
            weight = progress
        case "cosine":
            cosine = math.cos(math.pi * progress)
            weight = (1 - cosine) / 2
    final_rate = outer.final_learning_rate
    if final_rate is None:
        final_rate = outer.learning_rate / 7
    return outer.learning_rate + weight * (final_rate - outer.learning_rate)


def check_schedule(config: InnerOptimizer, total_steps: int | None = None) -> None:
    """Raise `ConfigError` if a schedule lacks a value, or has values that contradict each other."""
    name = config.schedule
    warmup = config.warmup_steps
    total = config.total_steps or total_steps
    if warmup and name in ("constant", "linear"):
        fix = "choose a schedule with warm-up, or leave warmup_steps out"
        raise ConfigError(
            "OPT001", f"inner_optimizer.schedule {name!r} has no warm-up", f"warmup_steps = {warmup}", fix=fix
        )
    if config.decay_steps is not None and name != "wsd":
        fix = "choose wsd, or leave decay_steps out"
        got = f"decay_steps = {config.decay_steps}"
        raise ConfigError("OPT002", f"inner_optimizer.schedule {name!r} has no decay_steps", got, fix=fix)
    if name == "constant":
        return
    if total is None:
        raise ConfigError("OPT003", f"inner_optimizer.schedule {name!r} needs total_steps", fix="set total_steps")
    needed_steps = warmup
    if name == "wsd":
        needed_steps += _decay_steps(config, total)
    if needed_steps > total:
        problem = "inner_optimizer.schedule: warm-up and decay take longer than the run"
        allowed = f"at most {total}, the total_steps"
        fix = "lower warmup_steps or decay_steps, or raise total_steps"
        if config.total_steps is None:
            allowed = f"at most {total}, those of the run"
            fix = "lower inner_optimizer.warmup_steps or decay_steps, or train longer"
        raise ConfigError("OPT004", problem, f"{needed_steps} steps", allowed, fix)


def _decay_steps(config: InnerOptimizer, total: int) -> int:
    return config.decay_steps or max(1, total // 5)


def _bounded(curve: Callable[[int], float], warmup: int, last_step: int, floor: float) -> Callable[[int], float]:
    """Return a curve that falls to `floor` instead of 0 after the warm-up, and is constant from step `last_step`."""

    def bounded(step: int) -> float:
        factor = curve(min(step, last_step))
        if step < warmup:
            return factor
        return floor + (1 - floor) * factor

    return bounded
