"""A tiny run in the middle of everything: what can happen next, and what becomes of the real core by it.

A worker takes an order when it is given, merges and evaluates at once, and says its last report with its delta; in
between are all orders of words, batches, answers of server and store, arrivals and crashes. No time passes but a moment
for each step, so nothing is taken for silent: a crash is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.planning.worker_plans import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.types import (
    Commit,
    Contribution,
    Delta,
    Evaluated,
    Event,
    Merged,
    Plan,
    Ready,
    Report,
    Saved,
    SliceInfo,
    Source,
    Verdict,
    window,
)
from tests.support.simulation_books import Books

STEP_S = 1e-4


@dataclass
class Worker:
    """What a worker knows, and its words that are on their way."""

    source: Source
    plan: Plan | None = None
    longest: Plan | None = None
    round: int = -1
    weights: int = -1
    done: int = 0
    trained: bool = True
    evaluated: bool = False
    alive: bool = True
    inner: int = -1
    words: list[Event] = field(default_factory=list)


class State:
    """A run in the middle."""

    def __init__(self, mode: str, core: type[SchedulerCore] = SchedulerCore) -> None:
        tables: dict[str, Any] = {
            "run": {"name": "run", "mode": mode},
            "rounds": {
                "update_rounds": 2,
                "samples_between_updates": 2,
                "max_batch_size": 1,
                "evaluate_every": 0,
            },
            "resources": {"num_workers": 2},
        }
        self.job = Job.model_validate(tables)
        splits = ("train", "train", "validation")
        self.slices = [SliceInfo(i, f"slice-{i}", "", size, splits[i]) for i, size in enumerate((2, 1, 2))]
        self.books, self._core_class = Books(self.job, self.slices), core
        self.workers: dict[int, Worker] = {}
        self.arriving: dict[int, Source] = {}
        self.said: list[Delta] = []
        self.crashes = self.repeats = 1
        self.steps, self.attempt = 0, 0
        self.over = False
        self._start()

    def _start(self) -> None:
        self.attempt += 1
        log = self.books.log
        spans = sorted(span for persist in log for _, spans in persist.spans for span in spans)
        used = [[s.epoch, s.slice, s.start, s.stop] for s in spans if s.epoch >= self.books.epoch]
        state = log[-1].state if log else {}
        epochs, inner = {"epoch": self.books.epoch, "used": used}, frozenset(self.books.inner)
        past = ResumePoint(self.attempt, len(log), epochs, state, inner)
        self.core = self._core_class(self.job, "run", self.slices, Sizes(100), past)
        self.workers.clear()
        self.arriving.clear()
        self.reduce: c.Reduce | None = None
        self.unwritten: list[int] = []
        self._perform(self.core.start(range(2), self.now))
        self._tell(c.Initialised(8, f"theta-{len(log) - 1}", "layout"))

    @property
    def now(self) -> float:
        return 1.0 + STEP_S * self.steps

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def moves(self) -> Iterator[tuple[Any, ...]]:
        """Everything that can happen next."""
        if self.over:
            return
        if self.reduce is not None:
            yield ("reduce",)
        if self.unwritten:
            yield ("write",)
        yield from (("arrive", number) for number in self.arriving)
        for number, worker in self.workers.items():
            if worker.words:
                yield "hear", number
            if self._can_train(worker):
                yield "train", number
            if self.crashes and worker.alive:
                yield from (("lose", number, kept) for kept in ((True, False) if worker.words else (False,)))
        if self.crashes:
            first = len(self.books.log) - len(self.unwritten)
            yield from (("crash", survivors) for survivors in range(first, len(self.books.log) + 1))
        if self.repeats:
            yield from (("repeat", index) for index in range(len(self.said)))

    def move(self, kind: str, *details: Any) -> None:
        """Let one of them happen."""
        self.steps += 1
        getattr(self, f"_{kind}")(*details)

    def _reduce(self) -> None:
        assert self.reduce is not None
        reduce, self.reduce = self.reduce, None
        pairs = zip(reduce.sources, reduce.weights, strict=True)
        accepted = tuple(Contribution(source.worker, source.incarnation, samples, 1.0) for source, samples in pairs)
        self._tell(c.Reduced(Verdict(reduce.round, accepted, (), 0.5)))

    def _write(self) -> None:
        number = self.unwritten.pop(0)
        self._tell(c.Committed(Saved(Commit(number, None, f"theta-{number}", "", (), (), {}, 0, {}, ()))))

    def _arrive(self, number: int) -> None:
        source = self.arriving.pop(number)
        self.workers[number] = Worker(source)
        self._tell(Ready(source, "layout", "cpu", 1))

    def _hear(self, number: int) -> None:
        words = self.workers[number].words
        event = words.pop(0)
        if isinstance(event, Report):  # Its delta comes with it.
            self._tell(event)
            event = words.pop(0)
        if isinstance(event, Delta) and event not in self.said:
            self.said.append(event)
        self._tell(event)

    def _train(self, number: int) -> None:
        worker = self.workers[number]
        worker.done += 1
        self._go(worker)

    def _lose(self, number: int, kept: bool) -> None:
        worker = self.workers[number]
        self.crashes, worker.alive = 0, False
        worker.words = [*worker.words, c.Lost(worker.source, "killed")] if kept else [c.Lost(worker.source, "killed")]  # type: ignore[list-item]

    def _crash(self, survivors: int) -> None:
        self.crashes = 0
        self.books.forget_attempt(survivors)
        self._start()

    def _repeat(self, index: int) -> None:
        self.repeats = 0
        self._tell(self.said[index])

    # ── the world ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self, event: c.Input) -> None:
        self.books.now = self.books.clock = self.now
        self.books.hear(event)
        self._perform(self.core.handle(event, self.now))

    def _perform(self, commands: list[c.Command]) -> None:
        for command in commands:
            self.books.obey(command)
            match command:
                case c.Hire(source=source):
                    self.arriving[source.worker] = source
                case c.Dismiss(worker=number):
                    self.arriving.pop(number, None)
                    self.workers.pop(number, None)
                case c.Assign(worker=number, plan=plan):
                    worker = self.workers[number]
                    worker.plan = plan
                    if worker.longest is None or (plan.round, plan.samples) > (
                        worker.longest.round,
                        worker.longest.samples,
                    ):
                        worker.longest = plan
                    self._go(worker)
                case c.Merge(worker=number, version=version):
                    self.workers[number].weights = version
                    self._go(self.workers[number])
                case c.RestoreInnerState(worker=number):
                    self.workers[number].inner = self.books.inner[number]
                case c.Reduce():
                    self.reduce = command
                case c.Persist(round=round_):
                    self.unwritten.append(round_)
                case c.Finish(error=error):
                    self.books.finish(self.core, error)
                    assert error is None
                    self.over = True
                    return
        self.books.check(self.core)

    def _go(self, worker: Worker) -> None:
        """Do all that takes no time."""
        plan = worker.plan
        if not worker.alive or plan is None or worker.weights != plan.round:
            return
        if worker.weights > worker.round:
            proof = f"theta-{worker.weights - 1}" if worker.round < 0 else None
            worker.round, worker.done, worker.evaluated, worker.trained = worker.weights, 0, False, False
            worker.words.append(Merged(worker.source, worker.round, proof))
        if plan.evaluate and not worker.evaluated:
            worker.evaluated = True
            worker.words.append(Evaluated(worker.source, worker.round, {"val_loss": (float(worker.weights), 1.0)}, 0.1))
        if worker.done and worker.done >= plan.samples and not worker.trained:
            self._deliver(worker)

    def _can_train(self, worker: Worker) -> bool:
        plan = worker.plan
        return (
            worker.alive and plan is not None and plan.round == worker.round and bool(plan.spans) and not worker.trained
        )

    def _deliver(self, worker: Worker) -> None:
        assert worker.longest is not None
        spans, inner = window(worker.longest.spans, 0, worker.done), worker.inner
        report = Report(
            worker.source, worker.round, worker.done, worker.done, worker.done, worker.done, 1.0, 0.1, 1, 0.0, 1e-3
        )
        replay = self.job.run.mode == "replay"
        delta = Delta(
            worker.source,
            worker.round,
            spans,
            worker.done,
            inner,
            worker.done,
            worker.done,
            1.0,
            1,
            8,
            0.1,
            0.0,
            replay,
        )
        worker.inner, worker.trained = worker.round, True
        worker.words += [report, delta]
