"""A run on a virtual clock: the real core with simulated workers, server, store and messages.

    core ──commands──► carry_out ──orders──► workers ──events──► tell ──► core
                           ├── Reduce ──► verdict ──────────────►│
                           └── Persist ──► commit ──────────────►│

Nothing fails here. A subclass gives batch times, and overrides what is to be slow or to fail.

Time passes only between actions; a `WallClock` lets it pass at the machine's pace.
"""

from __future__ import annotations

import heapq
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Self, TypeAlias

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import ReportSchedule
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.types import Commit, Contribution, Event, Saved, Source, Verdict

Action: TypeAlias = Callable[[], None]
"""Something that happens at a time."""
DueAction: TypeAlias = tuple[float, int, Action]
"""Time of an action, its number in the order of calls, and the action itself; sorted in this order."""

SPAN_S = 1 / 64
"""Seconds of a span of time whose actions are sorted together; a power of two, so that divisions by it are exact."""
PULSES = 4
"""Signs of life in the time of a lease, as of a real worker."""


class VirtualClock:
    """Time in seconds, and the actions that are due at later times.

    Only the actions of the present span of time are sorted; those of later spans are in lists. So the cost of an
    action doesn't grow with the number of those that are far away.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._queue: list[DueAction] = []
        """Actions of the present span that were known at its beginning, the last one first."""
        self._soon: list[DueAction] = []
        """Heap of actions before the end of the present span that came up within it."""
        self._span_end_s = 0.0
        self._later: dict[int, list[DueAction]] = {}
        """Actions of later spans, in any order, by the span's number."""
        self._spans: list[int] = []
        """Heap of the numbers of later spans."""
        self._at_once: deque[DueAction] = deque()
        """Actions that were due at the time of their call. They are in order as they come, so they need no heap."""
        self._is_halted = False

    def later(self, seconds: float, action: Action) -> None:
        """Schedule an action; actions due at the same time run in the order of these calls."""
        due_at = self.now + seconds
        entry = (due_at, next(self._order), action)
        if seconds == 0.0:
            self._at_once.append(entry)
        elif due_at < self._span_end_s:
            heapq.heappush(self._soon, entry)
        else:
            span_number = int(due_at / SPAN_S)
            actions = self._later.get(span_number)
            if actions is None:
                self._later[span_number] = [entry]
                heapq.heappush(self._spans, span_number)
            else:
                actions.append(entry)

    def _begin_span(self) -> None:
        """Sort the actions of the next span with any, unless the present one has some left."""
        if not self._queue and not self._soon and self._spans:
            span_number = heapq.heappop(self._spans)
            self._queue = self._later.pop(span_number)
            self._queue.sort(reverse=True)
            self._span_end_s = (span_number + 1) * SPAN_S

    @property
    def next_at(self) -> float:
        """Time of the next action; infinite if there is none."""
        self._begin_span()
        times = [self._queue[-1][0]] if self._queue else []
        times += [actions[0][0] for actions in (self._soon, self._at_once) if actions]
        return min(times, default=math.inf)

    def advance(self, deadline: float) -> bool:
        """Advance to the next action and run it, or to an earlier deadline; return whether an action ran."""
        queue = self._queue
        soon = self._soon
        at_once = self._at_once
        if not queue:
            self._begin_span()
            queue = self._queue
        is_soon = bool(soon) and (not queue or soon[0] < queue[-1])
        first_action = soon[0] if is_soon else queue[-1] if queue else None
        if at_once and (first_action is None or at_once[0] < first_action):
            first_action = at_once.popleft()
        elif first_action is None or (first_action[0] > deadline and first_action[0] > self.now):
            self.now = max(self.now, deadline)
            return False
        elif is_soon:
            heapq.heappop(soon)
        else:
            queue.pop()
        due_at, _, action = first_action
        self.now = max(self.now, due_at)
        action()
        return True

    def run(self, deadline: float) -> bool:
        """Run actions up to a deadline, until one of them calls `halt`; return whether one has."""
        soon = self._soon
        at_once = self._at_once
        self._is_halted = False
        while not self._is_halted:
            queue = self._queue
            if at_once and not (queue and queue[-1] < at_once[0]) and not (soon and soon[0] < at_once[0]):
                _, _, action = at_once.popleft()
            elif queue and not soon and queue[-1][0] <= deadline:
                due_at, _, action = queue.pop()
                self.now = max(self.now, due_at)
            elif self.advance(deadline):
                continue
            else:
                return False
            action()
        return True

    def halt(self) -> None:
        """End `run` after the present action."""
        self._is_halted = True


class WallClock(VirtualClock):
    """The machine's time since the first action: an action is late if those before it took too long."""

    def __init__(self) -> None:
        super().__init__()
        self._began_at = time.monotonic()
        self.latest_s = 0.0
        """Longest delay of an action, in seconds."""

    def advance(self, deadline: float) -> bool:
        """Wait for the next action and run it, or for the deadline if that is earlier."""
        until = min(deadline, self.next_at)
        remaining_s = self._began_at + until - time.monotonic()
        time.sleep(max(0.0, remaining_s))
        self.now = time.monotonic() - self._began_at
        self.latest_s = max(self.latest_s, self.now - until)
        return super().advance(deadline)


class World(ABC):
    """World around one run's core.

    Args:
        job: the job file.
        clock: clock of all actions.

    """

    core: SchedulerCore
    """Core of the present attempt."""

    def __init__(self, job: Job, clock: VirtualClock | None = None) -> None:
        self.job = job
        self._reports = ReportSchedule.of(job)
        self._pulse_s = job.lease_s / PULSES
        self.clock = clock or VirtualClock()
        self.workers: dict[int, SimulatedWorker] = {}
        self.hiring: dict[int, Source] = {}
        """Workers that are being started, by number."""
        self.over = False
        self._hashes: dict[int, str] = {}
        """Hashes of committed weights, by version."""
        self._written_at = 0.0
        """Time at which the store has written all rounds."""

    @abstractmethod
    def batch_s(self, source: Source) -> float:
        """Time of a batch that begins now, in seconds."""

    # ── the clock ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def now(self) -> float:
        """Present time in seconds."""
        return self.clock.now

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action."""
        self.clock.later(seconds, action)

    def run(self) -> Self:
        """Run to the end."""
        while not self.over:
            self.step()
        return self

    def step(self) -> None:
        """Run the next action, or tell the core that its deadline has passed."""
        if not self.clock.advance(self.deadline):
            self.tell(c.Tick())

    @property
    def deadline(self) -> float:
        """Time at which the core is told that nothing has happened."""
        return max(self.core.deadline, self.now)

    # ── the core ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(
        self,
        core: SchedulerCore,
        resume_point: ResumePoint,
        weights: c.Initialised,
        ready_s: float,
        fitting_workers: int,
    ) -> None:
        """Start an attempt; its weights are ready after `ready_s`, and so many workers have room at first."""
        self.core = core
        self._hashes[resume_point.state.get("step", resume_point.next_round)] = weights.theta_sha256
        self.answer(ready_s, weights)
        self.carry_out(core.start(range(fitting_workers), self.now))

    def tell(self, event: c.Input) -> None:
        """Have the core handle an event, and carry out its commands."""
        if not self.over:
            self.carry_out(self.take_in(event))

    def take_in(self, event: c.Input) -> list[c.Command]:
        """Give the core an event that arrives now; return its commands."""
        if isinstance(event, Event):
            self.core.arrived(event, self.now)
        return self.core.handle(event, self.now)

    def answer(self, seconds: float, event: c.Input) -> None:
        """Tell the core an event after a while, unless another attempt has begun by then."""
        core = self.core

        def tell() -> None:
            if self.core is core:
                self.tell(event)

        self.later(seconds, tell)

    def carry_out(self, commands: list[c.Command]) -> None:
        """Carry out commands, in order."""
        for command in commands:
            self.obey(command)

    def obey(self, command: c.Command) -> None:
        """Carry out one command."""
        match command:
            case c.Hire(source=source):
                self.hiring[source.worker] = source
                self.later(self.start_s(source), lambda: self._hire(source))
            case c.Dismiss(worker=number):
                self.hiring.pop(number, None)
                self.bury(number)
            case c.Feed() | c.Assign() | c.Merge() | c.RestoreInnerState() | c.Drain():
                self.send(command)
            case c.Reduce():
                self.reduce(command)
            case c.Persist():
                self.persist(command)
            case c.Finish():
                self.over = True

    # ── server and store ──────────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, command: c.Reduce) -> None:
        """Answer with the server's verdict."""
        self.answer(0.05, c.Reduced(self.verdict(command)))

    def verdict(self, command: c.Reduce) -> Verdict:
        """Verdict on deltas."""
        contributions: list[Contribution] = []
        for source, weight in zip(command.sources, command.weights, strict=True):
            contributions.append(Contribution(source.worker, source.incarnation, weight, 1.0))
        return Verdict(command.round, tuple(contributions), (), 0.5)

    def persist(self, command: c.Persist) -> None:
        """Write a round after those before it, and answer."""
        self._written_at = max(self.now, self._written_at) + self.commit_s(command.round)
        self.answer(self._written_at - self.now, c.Committed(self.saved(command)))

    def saved(self, command: c.Persist) -> Saved:
        """Answer of the store to a round; from now on its weights are known by their hash."""
        version = command.state.get("step", command.round + 1)  # Without a barrier versions count reductions.
        theta = self._hashes[version] = f"theta-{command.round}"
        return Saved(Commit(command.round, None, theta, "", command.verdict.accepted, command.spans, {}, 0, {}, ()))

    def commit_s(self, round: int) -> float:
        """Time that the store takes over a round."""
        return 0.5

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, command: c.Order) -> None:
        """Send an order to a worker."""
        worker = self.workers[command.worker]
        self.later(self.delay_s(command.worker), partial(worker.order, command))

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """Send a worker's event to the core."""
        self.later(self.delay_s(worker.source.worker), partial(self.tell, event))

    def delay_s(self, worker: int) -> float:
        """Time of a message to or from a worker."""
        return 0.01

    # ── workers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _hire(self, source: Source) -> None:
        if self.hiring.get(source.worker) != source:
            return
        if self.has_room(source):
            self.place(self.hiring.pop(source.worker))
        else:
            self.tell(c.PlacementFailed(source, "no room"))

    def has_room(self, source: Source) -> bool:
        """Whether there is a machine for a worker."""
        return True

    def place(self, source: Source) -> None:
        """Start a worker on a machine."""
        worker = self.workers[source.worker] = self.new_worker(source)
        worker.boot(self.layout(source))

    def new_worker(self, source: Source) -> SimulatedWorker:
        """Make a worker."""
        return SimulatedWorker(source, self)

    def layout(self, source: Source) -> str:
        """Layout of the model that a worker builds."""
        return "layout"

    def bury(self, number: int) -> None:
        """End a worker for good."""
        if (worker := self.workers.pop(number, None)) is not None:
            worker.alive = False

    def start_s(self, source: Source) -> float:
        """Time from a hire to a worker."""
        return 0.1

    def batch_size(self, source: Source) -> int | None:
        """Largest batch that fits into a worker's lease; None if that isn't tried."""
        return None

    def evaluate_s(self, source: Source) -> float:
        """Time of an evaluation that begins now."""
        return 0.2

    def pulse_s(self) -> float:
        """Time between two signs of life."""
        return self._pulse_s

    def report_due(self, seconds: float, batches: float, remaining_batches: float) -> bool:
        """Whether a worker reports, so long and so many batches after its last report, with so many ahead of it."""
        return self._reports.due(seconds, batches, remaining_batches)

    def theta_sha256(self, source: Source, version: int) -> str:
        """Hash that a worker finds of the weights of that version."""
        return self._hashes.get(version, "not committed")
