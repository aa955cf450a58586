"""The worker's own loop with given settings, and a plain loop of torch and transformers with the same ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.size import Size, now_s
from hypha_ray.config import Job
from hypha_ray.config.automatic import settings_of
from hypha_ray.model.environment import use_gpus
from hypha_ray.model.execution import resolved_job
from hypha_ray.model.layout import gather, layout_of
from hypha_ray.model.lora import build_trained
from hypha_ray.types import Delta, Evaluated, Flat, FragmentUpdate, Plan, Source, Span, WeightsVersion
from hypha_ray.types.events import HandOver
from hypha_ray.worker.incarnation import BatchSource, Inbox
from hypha_ray.worker.loop import TrainingLoop

SOURCE = Source("bench", 0, 1)
VALIDATION = 1
"""Batches of the evaluation after the last step."""
BETAS = (0.9, 0.95)
EPSILON = 1e-8
DECAY = 0.1
CLIP = 1.0
"""Settings of AdamW and of clipping that a job has by default."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Figures of a training."""

    settings: dict[str, Any]
    step_s: float
    """Seconds of a step, over all but the first ones."""
    first_s: float
    """Seconds of the first steps, in which models are compiled."""
    peak_gib: float | None
    """The most memory that tensors had on a GPU, by the worker's own account of its rounds; None on a CPU."""
    loss: float
    """Loss on samples that weren't trained on, after the last step."""
    mfu: float | None
    """Utilisation over the timed steps; None for cards and models without a figure."""


def train(size: Size, job: Job, ids: npt.NDArray[np.int64]) -> Trained:
    """Train as a worker does, in two rounds without an exchange, of which the second one is timed; then evaluate."""
    size.forget()
    use_gpus(1.0 if size.device == "cuda" else 0.0)
    job = resolved_job(job)
    sides = Sides(size, job, ids)
    TrainingLoop(job, SOURCE, sides.batch_source, sides.inbox, sides.hear).run()
    first, timed = sides.deltas
    assert timed.batches == size.steps - size.warm
    loss_sum, count = sides.evaluated[0].sums["val_loss"]
    peaks = [delta.peak_memory_bytes for delta in sides.deltas if delta.peak_memory_bytes is not None]
    peak_gib = round(max(peaks) / 2**30, 2) if peaks else None
    mfu = None
    if timed.tokens is not None and timed.token_operations is not None and timed.peak_operations is not None:
        mfu = timed.tokens * timed.token_operations / (timed.train_s * timed.peak_operations)
    return Trained(settings_of(job), timed.train_s / timed.batches, first.train_s, peak_gib, loss_sum / count, mfu)


class Sides:
    """Scheduler and server of one worker: new weights are what it has handed over.

    Args:
        size: size of the training.
        job: the job file.
        ids: tokens of all samples.

    """

    def __init__(self, size: Size, job: Job, ids: npt.NDArray[np.int64]) -> None:
        self._size = size
        self.batch_source = BatchSource(job.run.seed)
        self.inbox = Inbox()
        self.deltas: list[Delta] = []
        self.evaluated: list[Evaluated] = []
        self.batch_source.put(0, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        model = build_trained(job)
        self.inbox.merge(FragmentUpdate(WeightsVersion(0), 0), gather(model, layout_of(model), 0))
        self.inbox.assign(self._plan(0))

    def hear(self, item: Any) -> None:
        """Take an event; weights are answered with the next plan."""
        match item:
            case HandOver():
                self.deltas.append(item.delta)
                (weights,) = item.parts
                self._answer({name: array.copy() for name, array in weights.items()})
            case Evaluated():
                self.evaluated.append(item)

    def _answer(self, weights: Flat) -> None:
        version = len(self.deltas)
        self.inbox.merge(FragmentUpdate(WeightsVersion(version), 0), weights)
        self.inbox.assign(self._plan(version))

    def _plan(self, number: int) -> Plan:
        batch = self._size.batch
        warm = self._size.warm
        steps = self._size.steps
        spans = [Span(0, 0, 0, batch * warm), Span(0, 0, batch * warm, batch * steps)]
        held_out = Span(0, 0, batch * steps, batch * (steps + VALIDATION))
        if number < len(spans):
            return Plan(number, number, (spans[number],), batch, keep=frozenset({0}))
        return Plan(number, number, (), batch, (held_out,), keep=frozenset({0}), final=True)


def plain(size: Size, job: Job, ids: npt.NDArray[np.int64]) -> float:
    """Return the seconds of a step of a plain loop with fused AdamW, the job's settings, and no wait in a step."""
    size.forget()
    job = resolved_job(job)
    model = build_trained(job).to(size.device).train()
    if job.worker.attention != "none":
        model.set_attn_implementation(job.worker.attention)
    fused = {"fused": True} if size.device == "cuda" else {}
    rate = job.inner_optimizer.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), rate, BETAS, EPSILON, DECAY, **fused)
    mixed = torch.bfloat16 if job.worker.autocast == "bf16" else None

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(size.device, mixed, enabled=mixed is not None):
            loss: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    compute = torch.compile(loss_of, dynamic=False) if job.worker.compile is True else loss_of
    for step in range(size.steps):
        if step == size.warm:
            began = now_s(size)
        rows = torch.from_numpy(ids[step * size.batch : (step + 1) * size.batch])
        if size.device == "cuda":
            rows = rows.pin_memory()  # The copy from other memory may wait for the device.
        optimizer.zero_grad(set_to_none=True)
        compute(rows.to(size.device, non_blocking=True)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return (now_s(size) - began) / (size.steps - size.warm)
