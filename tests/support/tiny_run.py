"""A tiny run in the middle of everything: what can happen next, and what becomes of the real core by it.

A worker takes an order when it is given, merges and evaluates at once, and says its last report with its delta; in
between are all orders of words, batches, answers of server and store, arrivals and crashes. No time passes but a moment
for each step, so nothing is taken for silent: a crash is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.types import Commit, Contribution, Delta, Event, Ready, Report, Saved, SliceInfo, Source, Verdict
from tests.support.simulation_books import Books
from tests.support.walk_worker import WalkWorker

STEP_S = 1e-4


class Worker(WalkWorker):
    """Ends a batch when that is the next step; an evaluation takes no time."""

    def __init__(self, source: Source, world: State) -> None:
        super().__init__(source, world)
        self.words: list[c.Input] = []
        """Its words that are on their way."""
        self.training: Callable[[], None] | None = None
        """What follows the batch that it trains on."""

    def _spend(self, seconds: float, then: Callable[[], None]) -> None:
        if seconds:
            self._busy = self.training = then
        else:
            then()
            self.go()

    def train(self) -> None:
        """End the batch."""
        assert self.training is not None
        then, self.training, self._busy = self.training, None, None
        then()
        self.go()

    def _pulse(self) -> None:
        pass

    def key(self) -> str:
        """All that makes a difference for what it does."""
        left_out = {
            "_world",
            "_ahead",
            "_reported",
            "_seconds",
            "_busy",
            "training",
            *(() if self.training else ("_longest",)),
        }
        known = {name: value for name, value in vars(self).items() if name not in left_out}
        return repr((known, self.training is not None))


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
            if worker.alive and worker.training is not None:
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
        self.workers[number] = Worker(source, self)
        self.workers[number].boot("layout")

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
        self.workers[number].train()

    def _lose(self, number: int, kept: bool) -> None:
        worker = self.workers[number]
        self.crashes, worker.alive = 0, False
        worker.words = [*(worker.words if kept else []), c.Lost(worker.source, "killed")]

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
                case c.Feed() | c.Assign() | c.Merge() | c.RestoreInnerState():
                    self.workers[command.worker].order(command, self.books.inner.get(command.worker))
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

    def say(self, worker: WalkWorker, event: Event) -> None:
        if isinstance(event, Ready):
            self._tell(event)
        else:
            self.workers[worker.source.worker].words.append(event)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        raise AssertionError("no time passes")

    def batch_size(self, source: Source) -> int | None:
        return None

    def batch_s(self, source: Source) -> float:
        return 0.1

    def evaluate_s(self, source: Source) -> float:
        return 0.0

    def pulse_s(self) -> float:
        return 1.0

    def report_due(self, seconds: float, batches: float, remaining: float) -> bool:
        return False

    def theta_sha256(self, source: Source, version: int) -> str:
        return f"theta-{version - 1}"
