"""A worker as the scheduler sees it: the real inner loop's orders and words, with a clock in place of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler import messages as c
from hypha_ray.types import Alive, Delta, Evaluated, Event, Leaving, Left, Merged, Plan, Ready, Report, Source, window


class Surroundings(Protocol):
    """What a worker needs of the world."""

    job: Job

    def later(self, seconds: float, action: Callable[[], None]) -> None: ...

    def say(self, worker: SimulatedWorker, event: Event) -> None: ...

    def batch_s(self, source: Source) -> float: ...

    def proof(self, source: Source, round: int) -> str: ...


class SimulatedWorker:
    """Takes orders in any order, and any number of times; does one thing after the other, each in its time."""

    def __init__(self, source: Source, world: Surroundings, replay: bool) -> None:
        self.source, self._world, self._replay = source, world, replay
        self.alive, self.stuck, self.leaving = True, False, False
        self.cut = False
        """Its stream is broken."""
        self.frozen: list[Callable[[], None]] | None = None
        """While it is stopped: what it does as soon as it goes on."""
        self.inner: int | None = None
        """The round whose training its optimizer's state is of."""
        self._state: tuple[int | None] | None = None
        self._plan: Plan | None = None
        self._longest: Plan | None = None
        self._ahead: Plan | None = None
        """The plan after whose delta it has gone ahead, and with how many samples."""
        self._gone = 0
        self._weights: dict[int, bool] = {}
        """Numbers of the weights that are there and not merged, and whether they are whole."""
        self.round = self._at = -1
        """The round that it is in, and the number of the weights that it has merged."""
        self._next: int | None = None
        """The round whose weights it waits for."""
        self._merged = self._evaluated = self._proved = self._restored = False
        self._busy: object | None = None
        self._done = self._reported = 0
        self._said = self._batch_began = 0.0

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────

    def order(self, command: c.Command, state: int | None = None) -> None:
        """What the control thread does; `state` comes with `RestoreInnerState`."""
        match command:
            case c.Assign(plan=plan):
                newest = self._plan
                if newest is None or (plan.round, plan.version) > (newest.round, newest.version):
                    self._plan = plan
            case c.Merge(round=number, whole=whole):
                late = self._world.job.sync.in_flight > 1
                assert whole or late or self._at >= number - 1, "a difference to weights that it doesn't have"
                if number > self._at:
                    self._weights[number] = whole
            case c.RestoreInnerState():
                self._state = None if self._restored else (state,)
            case c.Drain(reason=reason):
                self.leave(reason)
        self.go()

    def leave(self, reason: str) -> None:
        """SIGTERM, or an order."""
        if self.alive and not self.leaving:
            self.leaving = True
            self._say(Leaving(self.source, self.round, reason))
            if not self._done:
                self._busy = None  # It ends at once, unless it is training.
            self.go()

    def boot(self, layout: str) -> None:
        self._say(Ready(self.source, -1, layout, "cpu", 1))
        self._pulse()
        self.go()

    def freeze(self) -> None:
        self.frozen = [] if self.frozen is None else self.frozen

    def thaw(self) -> None:
        missed, self.frozen = self.frozen or [], None
        for action in missed:
            action()
        self.go()

    # ── the inner loop ────────────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        """Do all that takes no time."""
        while self.alive and self.frozen is None and not self.stuck and self._busy is None and self._step():
            pass

    def _step(self) -> bool:
        plan = self._plan
        if self.leaving:
            self._say(Left(self.source, self.round))
            self.alive = False
        elif not self._merged:
            ahead = () if self._ahead is None or self._ahead.round != self.round else self._ahead.ahead
            if self._gone == sum(span.samples for span in ahead):
                return self._go_to_next()
            self._take(self._world.batch_s(self.source), self._go_ahead)
        elif plan is None or plan.round < self.round:
            return False
        elif plan.round > self.round:
            self._merged = False
            return True
        elif plan.evaluate and not self._evaluated:
            self._take(0.2, self._evaluate)
        elif plan.final:
            self.alive = False
        elif plan.spans:
            self._begin(plan)
        return False

    def _go_to_next(self) -> bool:
        if self._next is None:
            if self._plan is None or self._plan.round <= self.round:
                return False
            self._next = self._plan.round
        while self._at < (wanted := version_due(self._world.job, self._next)):
            if not self._merge(wanted):
                return False
        self.round, self._next, self._merged, self._evaluated = self._next, None, True, False
        return True

    def _merge(self, wanted: int) -> bool:
        whole = [number for number, whole in self._weights.items() if whole]
        old = [number for number in whole if number <= wanted]
        if not old and self._at + 1 in self._weights:
            self._at += 1
        elif whole:
            self._at = max(old or whole)
        else:
            return False
        self._weights = {number: whole for number, whole in self._weights.items() if number > self._at}
        proof = None if self._proved else self._world.proof(self.source, self._at - 1)
        self._proved = True
        self._say(Merged(self.source, self._at, 0.01, proof))
        return True

    def _evaluate(self) -> None:
        self._evaluated = True
        assert self._plan is not None
        count = sum(span.samples for span in self._plan.evaluate)
        # In the simulation a loss says of which weights it is.
        self._say(Evaluated(self.source, self.round, float(self._at * count), count, None, 0.2))

    def _begin(self, plan: Plan) -> None:
        if plan.restores and not self._restored:
            if self._state is None:
                return
            (self.inner,), self._restored = self._state, True
        self._done = self._reported = 0
        self._longest = plan
        if self._ahead is not None and self._ahead.round == plan.round - 1:
            self._done = self._gone
            assert window(plan.spans, 0, self._gone) == self._ahead.ahead, "it has begun with other samples"
        self._ahead, self._gone = None, 0
        if self._done < plan.samples:
            self._train(plan)
        else:
            self._deliver()

    def _go_ahead(self) -> None:
        assert self._ahead is not None
        size = min(self._ahead.batch_size, sum(span.samples for span in self._ahead.ahead) - self._gone)
        self._gone += size

    def _train(self, plan: Plan) -> None:
        assert self._longest is not None
        self._longest = max(self._longest, plan, key=lambda one: one.samples)
        size = min(plan.batch_size, plan.samples - self._done)
        self._take(self._world.batch_s(self.source), lambda: self._batch(size))

    def _batch(self, size: int) -> None:
        self._done += size
        assert self._plan is not None
        if self.leaving:
            self._deliver() if not self._replay else None
        elif self._plan.round != self.round:
            self._done, self._merged = 0, False
        elif self._done < self._plan.samples:
            self._report() if self._done - self._reported >= 2 * size else None
            self._train(self._plan)
        else:
            self._deliver()

    def _report(self) -> None:
        samples, self._reported = self._done - self._reported, self._done
        assert self._plan is not None
        batches = -(-samples // self._plan.batch_size)
        seconds = batches * self._world.batch_s(self.source)
        say = Report(self.source, self.round, batches, samples, samples, samples, 3.0, seconds, batches, 0.0, 1e-3)
        self._say(say)

    def _deliver(self) -> None:
        assert self._longest is not None
        if self._done > self._reported:
            self._report()
        spans, batches = window(self._longest.spans, 0, self._done), -(-self._done // self._longest.batch_size)
        # In the simulation a delta says by its tokens which inner state it was begun with.
        tokens = -1 if self.inner is None else self.inner
        delta = Delta(
            self.source, self.round, spans, self._done, tokens, self._done, batches, 3.0, 1, 8, 1.0, 0.0, self._replay
        )
        self.inner, self._done, self._merged = self.round, 0, False
        self._ahead, self._gone = self._plan, 0
        self._say(delta)

    def _take(self, seconds: float, then: Callable[[], None]) -> None:
        """Be busy for a while, unless something else makes an end of it."""
        token = self._busy = object()

        def over() -> None:
            if self.alive and self._busy is token and not self.stuck:
                if self.frozen is not None:
                    self.frozen.append(over)
                    return
                self._busy = None
                then()
                self.go()

        self._world.later(seconds, over)

    # ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _say(self, event: Event) -> None:
        self._world.say(self, event)

    def _pulse(self) -> None:
        if self.alive:
            if self.frozen is None:
                self._say(Alive(self.source, -1))
            self._world.later(1.0, self._pulse)
