"""The Ray actor of a worker. Training is one streaming call; orders arrive meanwhile on a control thread.

    run ──► events … deltas … Left            the scheduler dies:  reset ──► run, under another incarnation

The process outlives its scheduler, because starting another one and loading its libraries takes long. Under the next
scheduler it starts with an empty state.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import TypeAlias

import ray

from hypha_ray import traces
from hypha_ray.children import ListedActor
from hypha_ray.config import Job
from hypha_ray.failpoints import arm
from hypha_ray.files import uncollected
from hypha_ray.model.task import SpecialTokens
from hypha_ray.types import Arrays, Flat, FragmentUpdate, Layout, Plan, Samples, Source
from hypha_ray.worker.incarnation import BatchSource, Emit, Inbox, Incarnation, Item, Loop

FromDataset: TypeAlias = tuple[SpecialTokens | None, Samples | None]
"""Special tokens and samples, as a `TrainWorker` takes them."""


class TrainWorker(ListedActor):
    """Trains with torch inside the actor.

    `run` yields events; a `Delta` is followed by its payloads. All other methods only store orders, so they return at
    once, and may be called twice or in another order. Orders name their incarnation, so a late one of an earlier
    scheduler has no effect. SIGTERM, which announces the end of a machine, is an order to leave.

    Args:
        job: the job file.
        source: number and incarnation of the worker.
        specials: special tokens or whole tokenizer, as `trainer_of` takes them.
        samples: some samples of the dataset, for trials of batch sizes; None: no trials.

    """

    def __init__(
        self, job: Job, source: Source, specials: SpecialTokens | None = None, samples: Samples | None = None
    ) -> None:
        arm(job.testing.failpoints, job.testing.failpoint_log)
        traces.begin(job.telemetry.sinks, source.run, ray.get_runtime_context)
        self._job = job
        self._specials = specials
        self._samples = samples
        self._incarnation = Incarnation(job, source, self._loop)
        self._leave_lock = threading.Lock()
        """Taken for good by the first order to leave."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))

    def _loop(self, job: Job, source: Source, batch_source: BatchSource, inbox: Inbox, emit: Emit) -> Loop:
        with uncollected():
            from hypha_ray.batch_size import largest_batch
            from hypha_ray.model.environment import (  # A process that only starts this actor needs no torch.
                use_gpus,
                use_threads,
            )
            from hypha_ray.model.execution import resolved_job
            from hypha_ray.model.sources import require_same
            from hypha_ray.worker.loop import TrainingLoop

        group = job.group_of(source.worker)
        process_cpus = group.cpu / job.processes_of(source.worker)
        use_threads(max(1, int(process_cpus)))
        use_gpus(group.gpu)
        require_same(job, job.begun_with)
        job = resolved_job(job)
        batch_size = None
        if self._samples is not None:
            batch_size = largest_batch(job, source.worker, self._specials, self._samples, inbox.check)
        return TrainingLoop(job, source, batch_source, inbox, emit, self._specials, batch_size)

    @ray.method(num_returns="streaming")
    def run(self, to: Source) -> Iterator[Item]:
        """Stream the worker's events and payloads under one scheduler."""
        if to == self._incarnation.source:
            yield from self._incarnation.run()

    @ray.method(concurrency_group="control")
    def reset(self, source: Source) -> bool:
        """Drop everything, and be ready to `run` as `source` for another scheduler; False if the worker is leaving."""
        predecessor = self._incarnation
        self._incarnation = Incarnation(self._job, source, self._loop, predecessor)
        predecessor.abandon()
        return not self._leave_lock.locked()

    @ray.method(concurrency_group="control")
    def feed(self, index: int, arrays: Arrays) -> None:
        """Store a slice."""
        self._incarnation.batch_source.put(index, arrays)

    @ray.method(concurrency_group="control")
    def assign(self, to: Source, plan: Plan) -> None:
        """Store a plan, or a corrected one."""
        if to == self._incarnation.source and self._incarnation.inbox.assign(plan):
            self._incarnation.batch_source.keep(plan.keep)

    @ray.method(concurrency_group="control")
    def merge(self, to: Source, piece: FragmentUpdate, weights: Flat) -> None:
        """Store a fragment of the global weights."""
        if to == self._incarnation.source:
            self._incarnation.inbox.merge(piece, weights)

    @ray.method(concurrency_group="control")
    def restore(self, to: Source, state: Flat) -> None:
        """Store the predecessor's inner state after the last committed round."""
        if to == self._incarnation.source:
            self._incarnation.inbox.restore(state)

    @ray.method(concurrency_group="control")
    def leave(self, reason: str) -> None:
        """End the inner loop after its batch; it hands over its delta, and the stream ends with `Left`."""
        if self._leave_lock.acquire(blocking=False):
            self._incarnation.leave(reason)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the inner loop after its batch, and the stream with it; nothing is handed over."""
        self._incarnation.stop()

    @ray.method(concurrency_group="control")
    def flush_traces(self) -> None:
        """Export the last spans, as `tracing.flush`."""
        traces.flush()

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """Number of the process, for tests that kill it."""
        return os.getpid()


class BridgedWorker(TrainWorker):
    """Trains by an external process over the bridge. To all other actors it is like any other worker."""

    def _loop(self, job: Job, source: Source, batch_source: BatchSource, inbox: Inbox, emit: Emit) -> Loop:
        from hypha_ray.worker.bridged.loop import BridgedLoop

        return BridgedLoop(job, source, batch_source, inbox, emit, self._specials)

    @ray.method(concurrency_group="control")
    def describe(self, to: Source, layout: Layout) -> None:
        """Receive the layout of the tensors, since no model is built here."""
        if to == self._incarnation.source:
            self._incarnation.inbox.describe(layout)
