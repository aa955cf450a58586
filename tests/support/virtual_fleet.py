"""Workers and a server on a virtual clock, which drive the real core the way Ray does."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.planning.worker_plans import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.round import LOST
from hypha_ray.types import (
    Alive,
    Commit,
    Contribution,
    Delta,
    Evaluated,
    Leaving,
    Left,
    Merged,
    Plan,
    Ready,
    Rejection,
    Report,
    Saved,
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
    leaving: bool = False
    slices: set[int] = field(default_factory=set)


@dataclass
class Faults:
    """What goes wrong beside what a test does itself."""

    room: Callable[[Source], bool] = lambda source: True
    """Can this worker be placed?"""
    start_s: float = 0.1
    evaluate_s: float = 0.0
    proof: Callable[[Source, str], str] = lambda source, right: right
    """What a worker says is the hash of the weights that it begins with."""
    layout: Callable[[Source], str] = lambda source: "layout"
    reject: Callable[[Delta], str | None] = lambda delta: None
    norm: Callable[[Delta], float] = lambda delta: 1.0
    commit_s: Callable[[int], float] = lambda round: 0.5
    """How long the store takes over a round, once it is done with those before it."""


class VirtualFleet:
    """Runs a job to its end; `records`, `notes` and `persisted` tell what happened."""

    def __init__(
        self,
        job: Job,
        speeds: list[float | Callable[[float], float]],
        slices: list[SliceInfo],
        faults: Faults | None = None,
        past: ResumePoint | None = None,
    ) -> None:
        tables = job.model_dump(exclude_unset=True)
        tables["resources"] = {"num_workers": len(speeds), **tables.get("resources", {})}
        self.job, self.faults = Job.model_validate(tables), faults or Faults()
        self.now, self._order = 0.0, count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._speeds = [s if callable(s) else lambda _, s=s: s for s in speeds]
        self.workers: dict[int, VirtualWorker] = {}
        self._past = past or ResumePoint()
        self.core = SchedulerCore(self.job, "virtual", slices, Sizes(10_000), self._past)
        self.commands: list[tuple[float, c.Command]] = []
        self.records: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.persisted: list[c.Persist] = []
        self.reduces: list[c.Reduce] = []
        self.commits: list[tuple[float, int]] = []
        """When the store answered, and for which round."""
        self._stored_at = 0.0
        self.finished: c.Finish | None = None
        self._deltas: dict[Source, Delta] = {}

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def run(self, limit: int = 200_000) -> VirtualFleet:
        for command in self.core.start(range(len(self._speeds)), self.now):
            self._perform(command)
        parts = (1000 // self.job.sync.fragments,) * self.job.sync.fragments
        self.at(0.05, lambda: self.tell(c.Initialised(1000, _hash_before(self._past.next_round), "layout", parts)))
        for _ in range(limit):
            if self.finished:
                return self
            deadline = self.core.deadline
            if not self._queue or self._queue[0][0] > deadline:
                self.now = max(self.now, deadline)
                self.tell(c.Tick())
                continue
            at, _, action = heapq.heappop(self._queue)
            self.now = max(self.now, at)
            action()
        raise AssertionError("the run doesn't end")

    def tell(self, event: c.Input) -> None:
        for command in self.core.handle(event, self.now):
            self._perform(command)

    def kill(self, worker: int) -> None:
        self.workers[worker].alive = False
        self.tell(c.Lost(self.workers[worker].source, "killed"))

    def hang(self, worker: int) -> None:
        """Let a worker fall silent without anybody being told."""
        self.workers[worker].alive = False

    def stop(self, seconds: float) -> None:
        """Stop the scheduler's own process for a while; what is said meanwhile is read after that."""
        self.now += seconds

    def preempt(self, worker: int) -> None:
        """Let a worker end its batch, hand over what it has, and leave."""
        one = self.workers[worker]
        one.leaving = True
        self.tell(Leaving(one.source, one.merged, "preempted"))
        if one.training < 0:
            self._leave(one)

    def _hire(self, source: Source) -> None:
        if not self.faults.room(source):
            self.tell(c.PlacementFailed(source, "no room"))
            return
        worker = VirtualWorker(source, self._speeds[source.worker])
        self.workers[source.worker] = worker
        self.tell(Ready(source, -1, self.faults.layout(source), "cpu", 1))
        self._pulse(worker)

    def _pulse(self, worker: VirtualWorker) -> None:
        if worker.alive and not self.finished:
            self.tell(Alive(worker.source, -1))
            self.at(1.0, lambda: self._pulse(worker))

    def _leave(self, worker: VirtualWorker) -> None:
        worker.alive = False
        self.tell(Left(worker.source, worker.merged))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]

    def commanded(self, kind: type[c.Command]) -> list[tuple[float, Any]]:
        """Commands of a kind, with their times."""
        return [(at, command) for at, command in self.commands if isinstance(command, kind)]

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [note for note in self.notes if note["kind"] == kind]

    def _perform(self, command: c.Command) -> None:
        self.commands.append((self.now, command))
        match command:
            case c.Hire(source=source):
                self.at(self.faults.start_s, lambda: self._hire(source))
            case c.Drain(worker=worker):
                self.at(0.01, lambda: self.preempt(worker))
            case c.Dismiss(worker=worker):
                if worker in self.workers:
                    self.workers[worker].alive = False
            case c.Feed() | c.Assign() | c.Merge():
                self._instruct(self.workers[command.worker], command)
            case c.Reduce():
                self.reduces.append(command)
                self.at(0.05, lambda: self._reduce(command))
            case c.Persist():
                self.persisted.append(command)
                self._stored_at = max(self.now, self._stored_at) + self.faults.commit_s(command.round)
                self.at(self._stored_at - self.now, lambda: self._committed(command))
            case c.LogMetric(fields=fields):
                self.records.append(dict(fields))
            case c.LogEvent(fields=fields):
                self.notes.append(dict(fields))
            case c.Finish():
                self.finished = command

    def _committed(self, command: c.Persist) -> None:
        self.commits.append((self.now, command.round))
        self.tell(c.Committed(Saved(_commit(command))))

    def _instruct(self, worker: VirtualWorker, command: c.Feed | c.Assign | c.Merge) -> None:
        match command:
            case c.Feed(slice=index):
                worker.slices.add(index)
            case c.Assign(plan=plan):
                worker.plan = plan
                worker.slices &= plan.keep
                if worker.merged == plan.round and worker.training < 0 and worker.done == 0 and plan.spans:
                    self._train(worker, plan.round)  # It was idle in this round.
            case c.Merge(round=number):
                self.at(0.01, lambda: self._merge(worker, number))

    def _merge(self, worker: VirtualWorker, number: int) -> None:
        if not worker.alive or worker.plan is None:
            return
        first = worker.merged < 0
        worker.merged, worker.training, worker.done, worker.reported = number, -1, 0, 0
        before = self.core._strategy.commit_before(number)
        proof = self.faults.proof(worker.source, f"theta-{before}")
        self.tell(Merged(worker.source, number, proof if first else None))
        if worker.plan.evaluate:
            count_ = sum(span.samples for span in worker.plan.evaluate)
            assert {span.slice for span in worker.plan.evaluate} <= worker.slices
            evaluated = Evaluated(worker.source, number, {"val_loss": (2.0 * count_, float(count_))}, 0.0)
            self.at(self.faults.evaluate_s, lambda: self.tell(evaluated) if worker.alive else None)
        if worker.plan.spans:
            self._train(worker, number)

    def _train(self, worker: VirtualWorker, number: int) -> None:
        worker.training, worker.reported_at = number, self.now
        self.at(worker.batch_s(self.now), lambda: self._batch(worker, number))

    def _batch(self, worker: VirtualWorker, number: int) -> None:
        if not worker.alive or worker.plan is None or worker.training != number or worker.plan.round != number:
            return
        spans = window(worker.plan.spans, worker.done, worker.done + worker.plan.batch_size)
        assert {span.slice for span in spans} <= worker.slices, "a slice was assigned and never sent"
        worker.done += sum(span.samples for span in spans)
        if self.now - worker.reported_at >= 1.0 or worker.done >= worker.plan.samples:
            self._report(worker, number)
        if worker.leaving and self.job.run.mode == "replay":
            self._leave(worker)
        elif worker.plan is not None and worker.done < worker.plan.samples and not worker.leaving:
            self.at(worker.batch_s(self.now), lambda: self._batch(worker, number))
        else:
            self._deliver(worker, number)

    def _report(self, worker: VirtualWorker, number: int) -> None:
        samples = worker.done - worker.reported
        batches = -(-samples // self.job.rounds.max_batch_size)
        seconds, worker.reported_at, worker.reported = self.now - worker.reported_at, self.now, worker.done
        self.tell(
            Report(
                worker.source, number, batches, samples, samples, samples, 3.0 * samples, seconds, batches, 0.0, 1e-3
            )
        )

    def _deliver(self, worker: VirtualWorker, number: int) -> None:
        assert worker.plan is not None
        batches = -(-worker.done // self.job.rounds.max_batch_size)
        spans = window(self._longest(worker), 0, worker.done)
        samples, replay = worker.done, self.job.run.mode == "replay"
        delta = Delta(worker.source, number, spans, samples, samples, samples, batches, 3.0, 1, 1000, 1.0, 0.0, replay)
        worker.training = -1
        self._deltas[worker.source] = delta
        self.at(0.02, lambda: self.tell(delta))
        if worker.leaving:
            self.at(0.02, lambda: self._leave(worker))

    def _longest(self, worker: VirtualWorker) -> Any:
        member = self.core._roster.slots[worker.source.worker].member
        assert member is not None
        assigned = member.assigned
        assert worker.plan is not None and window(assigned, 0, worker.plan.samples) == worker.plan.spans
        return assigned

    def _reduce(self, command: c.Reduce) -> None:
        accepted, rejected = [], []
        for source, samples in zip(command.sources, command.weights, strict=True):
            reason = self.faults.reject(self._deltas[source])
            if reason:
                rejected.append(Rejection(source.worker, reason, blamed=reason != LOST))
            else:
                norm = self.faults.norm(self._deltas[source])
                accepted.append(Contribution(source.worker, source.incarnation, samples, norm))
        self.tell(c.Reduced(Verdict(command.round, tuple(accepted), tuple(rejected), 0.5)))


def past_of(persisted: list[c.Persist], attempt: int = 2) -> ResumePoint:
    """What a scheduler goes on from when the log has these rounds."""
    newest = persisted[-1]
    spans = sorted(span for persist in persisted for _, spans in persist.spans for span in spans)
    used = [[one.epoch, one.slice, one.start, one.stop] for one in spans if one.epoch >= newest.epoch]
    inner = frozenset(worker for persist in persisted for worker, _ in persist.spans)
    return ResumePoint(attempt, newest.round + 1, {"epoch": newest.epoch, "used": used}, newest.state, inner)


def _hash_before(round: int) -> str:
    return f"theta-{round - 1}"


def _commit(persist: c.Persist) -> Commit:
    theta, verdict = f"theta-{persist.round}", persist.verdict
    return Commit(persist.round, None, theta, "", verdict.accepted, persist.spans, {}, 0, {}, verdict.rejected)
