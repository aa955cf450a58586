"""Conflicts of the exchange: strategy, encodings, fragments, overlap, rounds that grow with its share, and goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hypha_ray.config.rl import RL
from hypha_ray.config.schema import Job


class Conflict(NamedTuple):
    """Two keys that exclude each other, or settings of the form ``key = value``."""

    first: str
    second: str
    fix: str


def exchange_conflicts(job: Job) -> Iterator[Conflict]:
    """All conflicts of the keys of `[sync]`."""
    is_replay = job.run.mode == "replay"
    yield from _of_strategy(job)
    yield from _of_visible_changes(job)
    yield from _of_sparse_deltas(job)
    if job.sync.in_flight > 1:
        yield from _of_exchanges_in_flight(job)
    if job.sync.overlaps:
        yield from _of_overlap(job, is_replay)
    if not job.sync.traits.has_barrier:
        yield from _of_asynchrony(job, is_replay)


def growth_conflicts(job: Job) -> Iterator[Conflict]:
    """All conflicts of a job whose rounds grow; none if they don't.

    Such a run has fewer rounds than its workers, servers and store expect. So whatever depends on the number of the
    last round is excluded.
    """
    key = "rounds.max_exchange_share"
    if job.rounds.max_exchange_share is None:
        return
    sync = job.sync
    if job.run.mode == "replay":
        yield Conflict(key, "run.mode", "times of exchanges aren't reproducible: choose elastic")
    if job.rl.algorithm is not None:
        yield Conflict(key, "rl.algorithm", "responses are of the weights that their round begins with: leave it out")
    if not sync.traits.own_weights:
        yield Conflict(key, "sync.strategy", "only DiLoCo has long rounds: choose diloco")
    if job.rounds.epochs is None:
        fix = "give rounds.epochs in place of update_rounds: the same samples take fewer rounds then"
        yield Conflict(key, "rounds.update_rounds", fix)
    if sync.staggered:
        yield Conflict(key, "sync.fragments", "the last round isn't known before: set sync.stagger = false")
    if sync.in_flight > 1:
        yield Conflict(key, "sync.in_flight", "the last round isn't known before: choose 1")
    if job.outer_optimizer.schedule != "constant":
        yield Conflict(key, "outer_optimizer.schedule", "the number of rounds isn't known before: choose constant")


def goal_conflicts(job: Job, external_key: str | None) -> Iterator[Conflict]:
    """All conflicts of a goal, for which workers come and go, all of one kind; none without one."""
    if not job.goal.is_set:
        return
    if job.run.mode == "replay":
        yield Conflict("goal", 'run.mode = "replay"', "replay needs all workers: leave one out")
    if job.workers:
        yield Conflict("goal", "workers", "a goal chooses among machines of one kind: give resources.worker instead")
    elif external_key:
        yield Conflict("goal", external_key, "external trainers aren't hired: leave one out")


def strategy_text(job: Job) -> str:
    """Write the strategy as a setting of the job."""
    return f'sync.strategy = "{job.sync.strategy}"'


def _of_strategy(job: Job) -> Iterator[Conflict]:
    """Conflicts of strategies without rounds of inner steps."""
    traits = job.sync.traits
    if traits.sends_gradients and job.sync.fragments > 1:
        fix = "leave sync.fragments at 1: gradients are clipped by their norm over all fragments"
        yield Conflict("sync.fragments", strategy_text(job), fix)
    if not traits.own_weights and job.rounds.warmup_rounds:
        yield Conflict("rounds.warmup_rounds", strategy_text(job), "only DiLoCo has long rounds")


def _of_visible_changes(job: Job) -> Iterator[Conflict]:
    """Conflicts of codecs that send only the changes of weights that bfloat16 shows."""
    sync = job.sync
    for key in ("codec", "downward_codec"):
        if getattr(sync, key) != "visible":
            continue
        setting = f'sync.{key} = "visible"'
        if sync.traits.sends_gradients:
            fix = "choose another codec: this one is of changes of weights, and these rounds exchange gradients"
            yield Conflict(setting, strategy_text(job), fix)
        if not sync.error_feedback:
            fix = "set it above 0: changes that aren't visible yet are kept until they are"
            yield Conflict(setting, "sync.error_feedback = 0", fix)


def _of_sparse_deltas(job: Job) -> Iterator[Conflict]:
    """Conflicts of codecs that leave most of each delta for later rounds, each worker other values."""
    sync = job.sync
    if sync.codec in ("visible", "topk") and sync.merge in ("median", "trimmed_mean"):
        fix = "choose mean: this rule drops values that only some workers send, and they are lost"
        yield Conflict(f'sync.codec = "{sync.codec}"', f'sync.merge = "{sync.merge}"', fix)


def _of_exchanges_in_flight(job: Job) -> Iterator[Conflict]:
    """Conflicts of several exchanges in flight, which are of different fragments."""
    sync = job.sync
    if sync.staggered and sync.in_flight <= sync.fragments:
        return
    cause = f"sync.fragments = {sync.fragments}" if sync.stagger else "sync.stagger = false"
    yield Conflict("sync.in_flight", cause, "set at least as many fragments, which take turns")


def _of_overlap(job: Job, is_replay: bool) -> Iterator[Conflict]:
    """Conflicts of overlap, with which workers have weights of their own."""
    hint = ""
    if job.sync.delay_steps:
        key = "sync.delay_steps"
    elif job.sync.mixing:
        key = "sync.mixing"
    else:
        key = "sync.fragments"
        hint = "; or set sync.stagger = false"
    if is_replay:
        yield Conflict(key, "run.mode", f"workers' own weights aren't saved: choose elastic{hint}")
    if not job.sync.traits.own_weights:
        yield Conflict(key, "sync.strategy", f"only DiLoCo workers have weights of their own{hint}")
    external_key = external_trainers_key(job)
    if external_key is not None:
        fix = f"an external trainer starts each round from the global weights{hint}"
        yield Conflict(key, external_key, fix)


def _of_asynchrony(job: Job, is_replay: bool) -> Iterator[Conflict]:
    """Conflicts of options that need the deltas or weights of all workers at the same time."""
    sync = job.sync
    strategy = strategy_text(job)
    if is_replay:
        yield Conflict("run.mode", strategy, "the order of arrival isn't reproducible: choose elastic")
    if sync.downward_codec != "fp32":
        yield Conflict("sync.downward_codec", strategy, "workers have different weights: choose fp32")
    if sync.quorum is not None:
        yield Conflict("sync.quorum", strategy, "deltas are merged as they arrive: leave it out")
    if sync.merge != "mean":
        yield Conflict("sync.merge", strategy, "a single delta has no median: choose mean")
    if sync.weighting not in ("samples", "uniform"):
        yield Conflict("sync.weighting", strategy, "deltas are merged one by one: choose samples")
    if job.outer_optimizer.name not in ("nesterov", "average"):
        fix = "only momentum can be delayed: choose nesterov or average"
        yield Conflict("outer_optimizer.name", strategy, fix)


def external_trainers_key(job: Job) -> str | None:
    """Key that gives the job trainers outside of Ray; None if it has none."""
    for number, group in enumerate(job.workers):
        if group.bridged:
            return f"workers.{number}.kind"
    return "bridge.commands" if job.bridge.commands else None


def synchronous_rl_conflicts(rl: RL, strategy: str) -> Iterator[Conflict]:
    """Conflicts of steps whose prompts are divided among workers, and which are those of one worker on all of them."""
    one_step = "leave it at 1: a round is one step of the server"
    part = "each worker sees a part of the prompts"
    if rl.epochs > 1:
        yield Conflict("rl.epochs", strategy, one_step)
    if rl.minibatches > 1:
        yield Conflict("rl.minibatches", strategy, one_step)
    if rl.is_asynchronous:
        yield Conflict("rl.staleness", strategy, "leave it at 0: a round is one step of the server")
    if rl.refill:
        yield Conflict("rl.refill", strategy, "leave it at 0: a round is one batch of each worker")
    if rl.recipe.advantage in ("batch_std", "batch_scale", "gae"):
        key = "rl.advantage" if rl.advantage else "rl.algorithm"
        yield Conflict(key, strategy, f"choose grpo, dapo or another of groups: {part}")
    if rl.kl_target is not None:
        yield Conflict("rl.kl_target", strategy, f"leave it out: {part}, and would adapt a coefficient of its own")
    if rl.reference == "average":
        fix = "choose initial: only steps of a worker are averaged"
        yield Conflict('rl.reference = "average"', strategy, fix)
