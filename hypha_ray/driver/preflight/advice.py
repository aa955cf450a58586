"""Advice on settings that are allowed but probably unintended, printed before the start."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import outer_steps_before

SETTLING = 5.0
"""Steps until outer momentum has 99 % of its final sum, in units of 1 / (1 − μ)."""


def advice(job: Job, gpus: float = 0.0) -> Iterator[str]:
    """Advice on a job, as texts; `gpus` is the number of GPUs of the cluster."""
    yield from _of_gpus(job, gpus)
    yield from _of_sparse_gradients(job)
    yield from _of_momentum(job)
    yield from _of_delay(job)
    yield from _of_policies(job)


def _of_gpus(job: Job, gpus: float) -> Iterator[str]:
    """Advice on GPUs that no worker leases: a worker uses those of its lease, and no other one."""
    leased = any(group.gpu for group in job.worker_groups if not group.bridged)
    if gpus and not leased and job.worker.device == "auto":
        yield f"all workers train on CPUs, because none leases a GPU, and there are {gpus:g}: set resources.worker.gpu"


def _of_sparse_gradients(job: Job) -> Iterator[str]:
    if job.sync.traits.sends_gradients and job.sync.codec == "topk" and "adam" in job.inner_optimizer.name:
        what = f"{job.inner_optimizer.name} on topk gradients learns less than one worker alone"
        yield f"{what}: its second moment meets values that come rarely and large; choose another codec, or sgd"


def _of_momentum(job: Job) -> Iterator[str]:
    """Advice on momentum, which steps once per exchange of a fragment, or with every delta without a barrier."""
    sync = job.sync
    momentum = job.outer_optimizer.momentum
    rounds = job.rounds.update_rounds
    steps = min(outer_steps_before(job, rounds, fragment) for fragment in range(sync.fragments))
    whose = "there are"
    if sync.staggered:
        whose = f"each of {sync.fragments} fragments has"
    if not sync.traits.has_barrier and not sync.delayed_nesterov:
        steps *= sync.period or job.num_workers
    if sync.traits.sends_gradients or job.outer_optimizer.name != "nesterov" or not momentum or not steps:
        return
    if (needed := round(SETTLING / (1 - momentum))) > steps:
        better = max(0.0, math.floor(100 * (1 - SETTLING / steps)) / 100)
        what = f"outer_optimizer.momentum {momentum:g} takes about {needed} rounds to settle, and {whose} {steps}"
        yield f"{what}: {better:g} would do, or more and shorter rounds"


def _of_delay(job: Job) -> Iterator[str]:
    """Advice on mixing: without it, a worker drops what it learned of a fragment while a result was on its way."""
    sync = job.sync
    batches = math.ceil(job.samples(job.rounds.warmup_rounds) / (job.num_workers * job.rounds.max_batch_size))
    every = batches * (sync.fragments if sync.staggered else 1)
    late = batches * (sync.in_flight - 1) + sync.delay_steps
    if not sync.mixing and 2 * late > every:
        what = f"results come {late} batches late, and are exchanged every {every} or so of a worker"
        yield f"{what}: all that it learns of a fragment meanwhile is dropped; set sync.mixing, or make rounds longer"


def _of_policies(job: Job) -> Iterator[str]:
    """Advice on momentum of policies, whose deltas agree at first."""
    outer = job.outer_optimizer
    if job.rl.algorithm is None or job.sync.traits.sends_gradients:
        return
    if outer.name == "nesterov" and outer.momentum > 0.5:
        yield f"outer_optimizer.momentum {outer.momentum:g} makes policies lose their entropy: take up to 0.5"
