"""A run on a virtual clock with everything that can go wrong: a seed gives it all, and a calm end proves liveness.

The real core decides. Around it are simulated workers, a network that delays, repeats and reorders, a server, a store
whose log outlives the scheduler, and weather: faults of the kinds that a walk's seed picks, until the storm is over.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.planning.round_planner import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.round import LOST
from hypha_ray.types import (
    Commit,
    Contribution,
    Delta,
    Event,
    Left,
    Ready,
    Rejection,
    Saved,
    Source,
    Verdict,
)
from tests.support.simulated_worker import SimulatedWorker
from tests.support.simulation_books import Books
from tests.support.simulation_books_async import AsyncBooks
from tests.support.simulation_books_flights import FlightBooks
from tests.support.weather import Weather

CALM_S = 900.0
"""Virtual seconds after the storm in which every run must end: longest back-off and wait, and the whole training."""
EVENTS = 20_000


class World:
    """One walk.

    Args:
        seed: of everything.
        core: the scheduler's brain.
        storm: whether anything goes wrong at all.

    """

    def __init__(self, seed: int, core: type[SchedulerCore] = SchedulerCore, storm: bool = True) -> None:
        self.random = random.Random(seed)
        self.weather = Weather(self.random, storm)
        self.job, self._core_class = self.weather.job, core
        several = FlightBooks if self.job.sync.in_flight > 1 else Books
        books = AsyncBooks if self.job.sync.strategy == "async" else several
        self.books = books(self.job, self.weather.slices)
        self.now, self.steps = 0.0, 0
        self._order, self._queue = count(), list[tuple[float, int, Callable[[], None]]]()
        self.workers: dict[int, SimulatedWorker] = {}
        self._zombies: list[SimulatedWorker] = []
        self._hiring: dict[int, Source] = {}
        self._lines: dict[Source, float] = {}
        """Until when a worker's words are on their way."""
        self.said: list[Delta] = []
        self._attempt, self._acknowledged, self._written = 0, 0, 0.0
        self._stopped_until, self._stopped_s = 0.0, 0.0
        self._inbox: list[c.Input] = []
        self.over = False
        self.trace: list[str] = []
        if storm and self.job.run.mode == "replay":
            self.books.calm = [persist.spans for persist in World(seed, storm=False).run().books.log]
        self._start()

    # ── the clock ─────────────────────────────────────────────────────────────────────────────────────────────────

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def run(self) -> World:
        """Through the storm and the calm after it, to the end of the run."""
        self.later(self.random.expovariate(1 / self.weather.gap_s), self._storm)
        while not self.over:
            self.steps += 1
            assert self.steps < EVENTS and self.now < self.weather.storm_s + CALM_S, "the run doesn't end"
            deadline = max(self.core.deadline, self._stopped_until, self.now)
            if self._queue and self._queue[0][0] <= deadline:
                self.now, _, action = heapq.heappop(self._queue)
                action()
            else:
                self.now = deadline
                self.tell(c.Tick())
        return self

    @property
    def clock(self) -> float:
        """The time without that in which the scheduler was stopped."""
        return self.now - self._stopped_s

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
        self.core = self._core_class(self.job, "run", self.weather.slices, Sizes(self.weather.held), past)
        attempt, parts = self._attempt, (4,) * self.job.sync.fragments
        ready = c.Initialised(8, f"theta-{len(log) - 1}", "layout", parts)
        self.later(
            self.random.uniform(0.01, 3.0),
            self._of(attempt, ready),
        )
        numbers = self.job.resources.num_workers
        self._perform(self.core.start(numbers if self.calm else self.random.randint(0, numbers), self.now))

    def crash(self) -> None:
        """The scheduler dies, and its workers with it; of what it let be written, some is there."""
        survivors = self.random.randint(self._acknowledged, len(self.books.log))
        self._restart(survivors)

    def _restart(self, survivors: int) -> None:
        for worker in list(self.workers):
            self._bury(worker)
        self._hiring.clear()
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
        """Let the core take in an event, and do what it says; then look whether all is well."""
        if self.over:
            return
        if self.now < self._stopped_until:
            self._inbox.append(event)
            return
        self.trace.append(f"{self.now:8.3f} {event}")
        self.books.now, self.books.clock = self.now, self.clock
        self.books.hear(event)
        self._perform(self.core.handle(event, self.now))

    def _of(self, attempt: int, event: c.Input) -> Callable[[], None]:
        """Tell the scheduler that has asked for it, and no later one."""
        return lambda: self.tell(event) if attempt == self._attempt else None

    def _perform(self, commands: list[c.Command]) -> None:
        for command in commands:
            self.trace.append(f"         {command}")
            self.books.obey(command)
            self._do(command)
            if isinstance(command, c.Finish):
                self._finish(command.error)
                return
        self.books.check(self.core)

    def _finish(self, error: Exception | None) -> None:
        self.books.finish(self.core, error)
        hopeless = self.core._roster.eligible < self.core._needed
        self.over = error is None or hopeless
        if not self.over:  # The user submits the run again.
            self._restart(len(self.books.log))

    # ── what it commands ──────────────────────────────────────────────────────────────────────────────────────────

    def _do(self, command: c.Command) -> None:
        match command:
            case c.Hire(source=source):
                self._hiring[source.worker] = source
                self.later(self.random.uniform(0.05, 2.0), lambda: self._hire(source))
            case c.Dismiss(worker=number):
                self._hiring.pop(number, None)
                self._bury(number)
            case c.Feed() | c.Assign() | c.Merge() | c.RestoreInnerState() | c.Drain():
                self._send(command)
            case c.Reduce():
                verdict = c.Reduced(self._verdict(command))
                for _ in range(self._copies()):
                    self.later(
                        self.random.uniform(0.01, self.weather.longest_reduce_s), self._of(self._attempt, verdict)
                    )
            case c.Persist():
                commit = Commit(command.round, None, f"theta-{command.round}", "", (), (), {}, 0, {}, ())
                problem = "the disk is full" if self.weather.happens("problem", self.random, 0.2) else None
                self._written = max(self._written + 1e-6, self.now + self.random.uniform(0.05, 4.0))
                attempt = self._attempt
                self.later(self._written - self.now, lambda: self._acknowledge(attempt, Saved(commit, problem)))

    def _send(self, command: c.Command) -> None:
        assert isinstance(command, c.Feed | c.Assign | c.Merge | c.RestoreInnerState | c.Drain)
        number = command.worker
        worker, state = self.workers[number], self.books.inner.get(number)
        for _ in range(self._copies()):
            self.later(self._delay(number), lambda: worker.order(command, state))

    def _verdict(self, command: c.Reduce) -> Verdict:
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

    def _hire(self, source: Source) -> None:
        if self._hiring.get(source.worker) != source:
            return
        if self.now < self.weather.full_until.get(source.worker, 0.0):
            self.tell(c.PlacementFailed(source, "no room"))
            return
        self._hiring.pop(source.worker)
        worker = SimulatedWorker(source, self, self.job.run.mode == "replay")
        self.workers[source.worker] = worker
        worker.boot(self.weather.layout(source))
        self.weather.arrived(self, source.worker)

    def _bury(self, number: int) -> None:
        """End a worker for good, unless the network keeps its killer away for a while."""
        worker = self.workers.pop(number, None)
        if worker is not None and self.weather.happens("zombie", self.random, 0.5):
            self._zombies.append(worker)
            self.later(self.random.uniform(0.1, 15.0), lambda: setattr(worker, "alive", False))
        elif worker is not None:
            worker.alive = False

    def lose(self, number: int) -> None:
        """A worker's process dies, and the scheduler is told."""
        worker = self.workers[number]
        if worker.alive:
            worker.alive = False
            self._lines.setdefault(worker.source, 0.0)
            at = self._lines[worker.source] = max(self._lines[worker.source], self.now + self._delay(number))
            self.later(at - self.now, lambda: self.tell(c.Lost(worker.source, "killed")))

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """A worker's words come in their order, but for what the weather does; what it said last may die with it."""
        if isinstance(event, Delta):
            self.said.append(event)
        source, swap = worker.source, self.weather.happens("reorder", self.random, 0.1)
        for _ in range(self._copies()):
            at = self.now + self._delay(source.worker)
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

    def proof(self, source: Source, round: int) -> str:
        return "false" if self.weather.lies(source) else self.books.weights(round + 1)

    def _copies(self) -> int:
        return 1 + self.weather.happens("repeat", self.random, 0.1)

    def _delay(self, number: int) -> float:
        return self.weather.delay_s(self.random, number, self.now)
