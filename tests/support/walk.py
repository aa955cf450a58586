"""A run on a virtual clock with everything that can go wrong: a seed gives it all, and a calm end proves liveness.

The network delays, repeats and reorders, the store's log outlives the scheduler, and the weather makes faults of the
kinds that a walk's seed picks, until the storm is over.
"""

from __future__ import annotations

import random
from typing import Self

from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import LOST
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.simulation.world import World
from hypha_ray.types import Commit, Contribution, Delta, Event, Left, Ready, Rejection, Saved, Source, Verdict
from tests.support.simulation_books import Books
from tests.support.simulation_books_async import AsyncBooks
from tests.support.walk_worker import WalkWorker
from tests.support.weather import Weather

CALM_S = 900.0
"""Virtual seconds after the storm in which every run must end: longest back-off and wait, and the whole training."""
EVENTS = 20_000


class Walk(World):
    """One walk.

    Args:
        seed: of everything.
        core: the scheduler's brain.
        storm: whether anything goes wrong at all.

    """

    def __init__(self, seed: int, core: type[SchedulerCore] = SchedulerCore, storm: bool = True) -> None:
        self.random, self._core_class = random.Random(seed), core
        self.weather = self.make_weather(storm)
        super().__init__(self.weather.job)
        books = AsyncBooks if self.job.sync.strategy == "async" else Books
        self.books = books(self.job, self.weather.slices)
        self.steps = 0
        self._lines: dict[Source, float] = {}
        """Until when a worker's words are on their way."""
        self.said: list[Delta] = []
        self._attempt, self._acknowledged = 0, 0
        self._stopped_until, self._stopped_s = 0.0, 0.0
        self._inbox: list[c.Input] = []
        self.trace: list[str] = []
        if storm and self.job.run.mode == "replay":
            self.books.calm = [persist.spans for persist in self.calm_walk(seed).run().books.log]
        self._start()

    def calm_walk(self, seed: int) -> Walk:
        """The same walk in which nothing goes wrong."""
        return Walk(seed, storm=False)

    def make_weather(self, storm: bool) -> Weather:
        """What goes wrong, and with it the job."""
        return Weather(self.random, storm)

    # ── the clock ─────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Self:
        """Go through the storm and the calm after it, to the end of the run."""
        self.later(self.random.expovariate(1 / self.weather.gap_s), self._storm)
        return super().run()

    def step(self) -> None:
        self.steps += 1
        assert self.steps < EVENTS and self.now < self.weather.storm_s + CALM_S, "the run doesn't end"
        super().step()

    @property
    def deadline(self) -> float:
        return max(super().deadline, self._stopped_until)

    @property
    def calm(self) -> bool:
        return self.now >= self.weather.storm_s

    def _storm(self) -> None:
        if not self.calm:
            self.weather.strike(self)
            self.later(self.random.expovariate(1 / self.weather.gap_s), self._storm)
        else:
            self.weather.clear_up(self)

    # ── the scheduler's process ───────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        """A scheduler goes on from what the log has."""
        self._attempt += 1
        log = self.books.log
        spans = sorted(span for persist in log for _, spans in persist.spans for span in spans)
        used = [[span.epoch, span.slice, span.start, span.stop] for span in spans if span.epoch >= self.books.epoch]
        state = log[-1].state if log else {}
        past = ResumePoint(
            self._attempt, len(log), {"epoch": self.books.epoch, "used": used}, state, frozenset(self.books.inner)
        )
        core = self._core_class(self.job, "run", self.weather.slices, Sizes(self.weather.held), past)
        weights = c.Initialised(8, f"theta-{len(log) - 1}", "layout", (4,) * self.job.sync.fragments)
        ready_s, numbers = self.random.uniform(0.01, 3.0), self.job.num_workers
        self.begin(core, past, weights, ready_s, numbers if self.calm else self.random.randint(0, numbers))

    def crash(self) -> None:
        """The scheduler dies, and its workers with it; of what it let be written, some is there."""
        survivors = self.random.randint(self._acknowledged, len(self.books.log))
        self._restart(survivors)

    def _restart(self, survivors: int) -> None:
        for worker in list(self.workers):
            self.bury(worker)
        self.hiring.clear()
        self._inbox.clear()
        self._stopped_until = 0.0
        self._acknowledged = survivors
        self.books.forget_attempt(survivors)
        self._start()

    def pause(self, seconds: float) -> None:
        """The scheduler's process is stopped for a while."""
        if self.now > self._stopped_until + 10.0:
            self._stopped_until = self.now + seconds
            self.later(seconds, lambda: self._resume(seconds))

    def _resume(self, seconds: float) -> None:
        if self.now == self._stopped_until:
            self._stopped_s += seconds
            heard, self._inbox = self._inbox, []
            if self.random.random() < 0.5:
                self.tell(c.Tick())
            for event in heard:
                self.tell(event)

    def tell(self, event: c.Input) -> None:
        """Keep an event while the scheduler is stopped; have the core take it in else."""
        if self.now < self._stopped_until:
            self._inbox.append(event)
        else:
            super().tell(event)

    def take_in(self, event: c.Input) -> list[c.Command]:
        self.trace.append(f"{self.now:8.3f} {event}")
        self.books.now, self.books.clock = self.now, self.now - self._stopped_s
        self.books.hear(event)
        return super().take_in(event)

    def carry_out(self, commands: list[c.Command]) -> None:
        """Carry out commands; then look whether all is well."""
        for command in commands:
            self.trace.append(f"         {command}")
            self.books.obey(command)
            self.obey(command)
            if isinstance(command, c.Finish):
                self._finish(command.error)
                return
        self.books.check(self.core)

    def _finish(self, error: Exception | None) -> None:
        self.books.finish(self.core, error)
        hopeless = self.core.view().roster.eligible < self.core.view().needed
        self.over = error is None or hopeless
        if not self.over:  # The user submits the run again.
            self._restart(len(self.books.log))

    # ── what it commands ──────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, command: c.Reduce) -> None:
        verdict = c.Reduced(self.verdict(command))
        for _ in range(self._copies()):
            self.answer(self.random.uniform(0.01, self.weather.longest_reduce_s), verdict)

    def persist(self, command: c.Persist) -> None:
        commit = Commit(command.round, None, f"theta-{command.round}", "", (), (), {}, 0, {}, ())
        problem = "the disk is full" if self.weather.happens("problem", self.random, 0.2) else None
        self._written_at = max(self._written_at + 1e-6, self.now + self.random.uniform(0.05, 4.0))
        attempt = self._attempt
        self.later(self._written_at - self.now, lambda: self._acknowledge(attempt, Saved(commit, problem)))

    def send(self, command: c.Order) -> None:
        worker, inner = self.workers[command.worker], self.books.inner.get(command.worker)
        for _ in range(self._copies()):
            self.later(self.delay_s(command.worker), lambda: worker.order(command, inner))

    def verdict(self, command: c.Reduce) -> Verdict:
        poisoned = self.weather.poisoned(command.sources)
        weights = zip(command.sources, command.weights, strict=True)
        accepted = (
            Contribution(s.worker, s.incarnation, n, n + s.worker / 8) for s, n in weights if s.worker not in poisoned
        )
        rejected = tuple(
            Rejection(number, "non-finite values") if (number + command.round) % 2 else Rejection(number, LOST, False)
            for number in sorted(poisoned)
        )
        return Verdict(command.round, tuple(accepted), rejected, 0.5)

    def _acknowledge(self, attempt: int, saved: Saved) -> None:
        if attempt == self._attempt:
            self._acknowledged = saved.commit.round + 1
            self.tell(c.Committed(saved))

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def start_s(self, source: Source) -> float:
        return self.random.uniform(0.05, 2.0)

    def has_room(self, source: Source) -> bool:
        return self.now >= self.weather.full_until.get(source.worker, 0.0)

    def new_worker(self, source: Source) -> WalkWorker:
        return WalkWorker(source, self)

    def place(self, source: Source) -> None:
        super().place(source)
        self.weather.arrived(self, source.worker)

    def layout(self, source: Source) -> str:
        return self.weather.layout(source)

    def bury(self, number: int) -> None:
        """End a worker for good, unless the network keeps its killer away for a while."""
        if number in self.workers and self.weather.happens("zombie", self.random, 0.5):
            worker = self.workers.pop(number)
            self.later(self.random.uniform(0.1, 15.0), lambda: setattr(worker, "alive", False))
        else:
            super().bury(number)

    def lose(self, number: int) -> None:
        """A worker's process dies, and the scheduler is told."""
        worker = self.workers[number]
        if worker.alive:
            worker.alive = False
            self._lines.setdefault(worker.source, 0.0)
            at = self._lines[worker.source] = max(self._lines[worker.source], self.now + self.delay_s(number))
            self.later(at - self.now, lambda: self.tell(c.Lost(worker.source, "killed")))

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """A worker's words come in their order, but for what the weather does; what it said last may die with it."""
        if isinstance(event, Delta):
            self.said.append(event)
        source, swap = worker.source, self.weather.happens("reorder", self.random, 0.1)
        for _ in range(self._copies()):
            at = self.now + self.delay_s(source.worker)
            if not swap or isinstance(event, Ready | Left):
                at = self._lines[source] = max(at, self._lines.get(source, 0.0))
            self.later(at - self.now, lambda: self._arrive(worker, event))

    def _arrive(self, worker: SimulatedWorker, event: Event) -> None:
        """A stream that breaks loses its end, and nothing before that."""
        if not worker.alive and not worker.leaving and self.weather.happens("drop", self.random, 0.5):
            worker.cut = True
        if not worker.cut:
            self.tell(event)

    def batch_s(self, source: Source) -> float:
        return self.weather.batch_s(source.worker, self.now)

    def pulse_s(self) -> float:
        return 1.0

    def report_due(self, seconds: float, batches: float, remaining: float) -> bool:
        return batches >= 2

    def theta_sha256(self, source: Source, version: int) -> str:
        return "false" if self.weather.lies(source) else self.books.weights(version)

    def _copies(self) -> int:
        return 1 + self.weather.happens("repeat", self.random, 0.1)

    def delay_s(self, number: int) -> float:
        return self.weather.delay_s(self.random, number, self.now)
