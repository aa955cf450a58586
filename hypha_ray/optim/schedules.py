"""Learning rates over inner steps and over rounds, by the names that a job file uses.

The curves are transformers'. A round may have more inner steps than planned, so past its last step a curve stays where
it ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from hypha_ray.config.schema import Job
from hypha_ray.config.tables.training import InnerOptimizer, OuterOptimizer
from hypha_ray.errors import ConfigError
from hypha_ray.types import Plan

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LambdaLR


def build_schedule(
    optimizer: torch.optim.Optimizer, config: InnerOptimizer, total_steps: int | None = None
) -> LambdaLR:
    """Build a schedule; its `step` is called after each inner step.

    Args:
        optimizer: whose learning rates, as they are now, are the peak.
        config: schedule, warm-up and decay; its `total_steps` comes before the argument.
        total_steps: inner steps that the run is planned to have; None: unknown.

    Raises:
        ConfigError: a value is missing, or contradicts another.

    """
    from transformers import optimization as curves

    from hypha_ray.optim.own import own_factor

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

            schedule = LambdaLR(optimizer, own_factor(own, config.schedule_options, total, warmup))
    if config.schedule != "constant":
        schedule.lr_lambdas = [_held(curve, warmup, total, config.min_lr_rate) for curve in schedule.lr_lambdas]
    return schedule


def steps_before(job: Job, round: float) -> float:
    """Steps in all rounds before one, of a worker if all are equally fast: what schedules count in."""
    if job.sync.traits.sends_gradients:
        return round
    short = min(round, job.rounds.warmup_rounds)
    steps = -(-job.rounds.samples_between_updates // (job.num_workers * job.rounds.max_batch_size))
    return short + (round - short) * steps


def inner_steps(job: Job) -> int:
    """Length of the schedule: steps of the whole run, unless the job file says otherwise."""
    return job.inner_optimizer.total_steps or int(steps_before(job, job.rounds.update_rounds))


def position(job: Job, plan: Plan, done: float) -> float:
    """Step of the schedule when that part of a plan is done."""
    first, last = plan.progress or (plan.round, plan.round + 1)
    return steps_before(job, first + (last - first) * done)


def rates(job: Job, plan: Plan) -> tuple[float, float]:
    """Learning rates at the beginning and at the end of a plan."""
    config = job.inner_optimizer
    if config.schedule == "constant":
        return config.learning_rate, config.learning_rate
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    curves = build_schedule(optimizer, config, inner_steps(job)).lr_lambdas
    (curve,) = cast("list[Callable[[float], float]]", curves)
    first, last = (config.learning_rate * curve(position(job, plan, done)) for done in (0, 1))
    return first, last


def outer_rate(outer: OuterOptimizer, round: int, rounds: int) -> float:
    """η of a round, of so many: from `learning_rate` in the first one to `final_learning_rate` in the last one."""
    part = min(1.0, round / max(1, rounds - 1))
    match outer.schedule:
        case "constant":
            return outer.learning_rate
        case "linear":
            bend = part
        case "cosine":
            bend = (1 - math.cos(math.pi * part)) / 2
    final = outer.learning_rate / 7 if outer.final_learning_rate is None else outer.final_learning_rate
    return outer.learning_rate + bend * (final - outer.learning_rate)


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
    needed = warmup + (_decay_steps(config, total) if name == "wsd" else 0)
    if needed > total:
        what = "inner_optimizer.schedule: warm-up and decay take longer than the run"
        fix = "lower warmup_steps or decay_steps, or raise total_steps"
        raise ConfigError("OPT004", what, f"{needed} steps", f"at most {total}, the total_steps", fix)


def _decay_steps(config: InnerOptimizer, total: int) -> int:
    return config.decay_steps or max(1, total // 5)


def _held(curve: Callable[[int], float], warmup: int, last: int, floor: float) -> Callable[[int], float]:
    """Return a curve that falls to `floor` once it is warmed up, and stays what it is at step `last`."""

    def held(step: int) -> float:
        factor = curve(min(step, last))
        return factor if step < warmup else floor + (1 - floor) * factor

    return held
