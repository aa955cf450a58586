"""Workers and a server on a virtual clock, which drive the real core the way Ray does."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import commands as c
from hypha_ray.scheduler.assigner import Sizes
from hypha_ray.scheduler.core import Core
from hypha_ray.types import (
    Contribution,
    Delta,
    Evaluated,
    Merged,
    Plan,
    Ready,
    Rejection,
    Report,
    SliceInfo,
    Source,
    Verdict,
    window,
)


def job_of(**tables: dict[str, Any]) -> Job:
    return Job.model_validate({"run": {"name": "virtual"}, **tables})


def slices_of(train: int = 20, samples: int = 64, validation: int = 2) -> list[SliceInfo]:
    splits = ["train"] * train + ["validation"] * validation
    return [SliceInfo(i, f"slice-{i}", "0" * 64, samples, split) for i, split in enumerate(splits)]


@dataclass
class VirtualWorker:
    """Trains one batch every `batch_s(now)` seconds."""

    source: Source
    batch_s: Callable[[float], float]
    plan: Plan | None = None
    merged: int = -1
    training: int = -1
    done: int = 0
    reported: int = 0
    reported_at: float = 0.0
    alive: bool = True
    slices: set[int] = field(default_factory=set)


class VirtualFleet:
    """Runs a job to its end; `records`, `notes` and `persisted` tell what happened."""

    def __init__(
        self, job: Job, speeds: list[float | Callable[[float], float]], slices: list[SliceInfo], reject: Any = None
    ) -> None:
        self.job, self.reject = job, reject or (lambda delta: None)
        self.now, self._order = 0.0, count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.workers = {
            i: VirtualWorker(Source("virtual", i, 0), s if callable(s) else lambda _, s=s: s)
            for i, s in enumerate(speeds)
        }
        sources = [worker.source for worker in self.workers.values()]
        self.core = Core(job, sources, slices, Sizes(1000, 10_000), 0.0)
        self.records: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.persisted: list[c.Persist] = []
        self.reduces: list[c.Reduce] = []
        self.finished: c.Finish | None = None
        self._deltas: dict[int, Delta] = {}

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def run(self, limit: int = 200_000) -> VirtualFleet:
        for worker in self.workers.values():
            self.at(0.1, lambda w=worker: self.tell(Ready(w.source, -1, "layout", "cpu", 1)))
        for _ in range(limit):
            deadline = self.core.deadline
            if self.finished:
                return self
            if deadline is not None and (not self._queue or self._queue[0][0] > deadline):
                self.now = deadline
                self.tell(c.Tick())
                continue
            assert self._queue, "the run is stuck"
            self.now, _, action = heapq.heappop(self._queue)
            action()
        raise AssertionError("the run doesn't end")

    def tell(self, event: c.Input) -> None:
        for command in self.core.handle(event, self.now):
            self._perform(command)

    def kill(self, worker: int) -> None:
        self.workers[worker].alive = False
        self.tell(c.Lost(self.workers[worker].source, "killed"))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def _perform(self, command: c.Command) -> None:
        match command:
            case c.Feed(worker=worker, slice=index):
                self.workers[worker].slices.add(index)
            case c.Assign(worker=worker, plan=plan):
                self.workers[worker].plan = plan
                self.workers[worker].slices &= plan.keep
            case c.Merge(worker=worker, round=number):
                self.at(0.01, lambda: self._merge(self.workers[worker], number))
            case c.Reduce():
                self.reduces.append(command)
                self.at(0.05, lambda: self._reduce(command))
            case c.Persist():
                self.persisted.append(command)
            case c.Record(fields=fields):
                self.records.append(dict(fields))
            case c.Note(fields=fields):
                self.notes.append(dict(fields))
            case c.Finish():
                self.finished = command

    def _merge(self, worker: VirtualWorker, number: int) -> None:
        if not worker.alive or worker.plan is None:
            return
        worker.merged, worker.training, worker.done, worker.reported = number, number, 0, 0
        self.tell(Merged(worker.source, number, 0.01))
        if worker.plan.evaluate:
            count_ = sum(span.samples for span in worker.plan.evaluate)
            assert {span.slice for span in worker.plan.evaluate} <= worker.slices
            self.tell(Evaluated(worker.source, number, 2.0 * count_, count_, None, 0.0))
        worker.reported_at = self.now
        if worker.plan.spans:
            self.at(worker.batch_s(self.now), lambda: self._batch(worker, number))

    def _batch(self, worker: VirtualWorker, number: int) -> None:
        if not worker.alive or worker.plan is None or worker.training != number or worker.plan.round != number:
            return
        spans = window(worker.plan.spans, worker.done, worker.done + worker.plan.batch_size)
        assert {span.slice for span in spans} <= worker.slices, "a slice was assigned and never sent"
        worker.done += sum(span.samples for span in spans)
        if self.now - worker.reported_at >= 1.0 or worker.done >= worker.plan.samples:
            self._report(worker, number)
        if worker.plan is not None and worker.done < worker.plan.samples:
            self.at(worker.batch_s(self.now), lambda: self._batch(worker, number))
        else:
            self._deliver(worker, number)

    def _report(self, worker: VirtualWorker, number: int) -> None:
        samples = worker.done - worker.reported
        batches = -(-samples // self.job.rounds.max_batch_size)
        seconds, worker.reported_at, worker.reported = self.now - worker.reported_at, self.now, worker.done
        self.tell(Report(worker.source, number, batches, samples, samples, 3.0 * samples, seconds, batches, 0.0, 1e-3))

    def _deliver(self, worker: VirtualWorker, number: int) -> None:
        assert worker.plan is not None
        batches = -(-worker.done // self.job.rounds.max_batch_size)
        spans = window(self._longest(worker), 0, worker.done)
        delta = Delta(worker.source, number, spans, worker.done, worker.done, batches, 3.0, 1, 1000, 1.0, 0.0)
        worker.training = -1
        self._deltas[worker.source.worker] = delta
        self.at(0.02, lambda: self.tell(delta))

    def _longest(self, worker: VirtualWorker) -> Any:
        assigned = self.core._members[worker.source.worker].assigned
        assert worker.plan is not None and window(assigned, 0, worker.plan.samples) == worker.plan.spans
        return assigned

    def _reduce(self, command: c.Reduce) -> None:
        accepted, rejected = [], []
        for source, samples in zip(command.sources, command.samples, strict=True):
            reason = self.reject(self._deltas[source.worker])
            if reason:
                rejected.append(Rejection(source.worker, reason))
            else:
                accepted.append(Contribution(source.worker, source.incarnation, samples, 1.0))
        self.tell(c.Reduced(Verdict(command.round, tuple(accepted), tuple(rejected), 0.5)))
