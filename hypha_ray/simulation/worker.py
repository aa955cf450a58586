"""A simulated worker: orders and events are those of the real inner loop, and training takes virtual time.

boot ──► merge the weights that are due ──► evaluate ──► train batch by batch ──► deliver ────┐
                   ▲                                                                         │
                   └────────── train ahead, on samples of the next round, if planned ◄───────┘
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Protocol

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import version_due
from hypha_ray.scheduler import messages as c
from hypha_ray.types import (
    Alive,
    Delta,
    Evaluated,
    Event,
    Leaving,
    Left,
    Merged,
    Plan,
    Ready,
    Report,
    Source,
    WeightsVersion,
    samples_of,
    window,
)


class Surroundings(Protocol):
    """World around a worker. Times in seconds."""

    job: Job

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action."""

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """Send an event to the scheduler."""

    def batch_s(self, source: Source) -> float:
        """Time of a batch that begins now."""

    def batch_size(self, source: Source) -> int | None:
        """Largest batch that fits into a worker's lease; None if that isn't tried."""

    def evaluate_s(self, source: Source) -> float:
        """Time of an evaluation that begins now."""

    def pulse_s(self) -> float:
        """Time between two signs of life."""

    def report_due(self, seconds: float, batches: float, remaining_batches: float) -> bool:
        """Whether a worker reports, so long and so many batches after its last report, with so many ahead of it."""

    def theta_sha256(self, source: Source, version: int) -> str:
        """Hash that a worker finds of the weights of that version."""


class SimulatedWorker:
    """Accepts orders in any order and repeatedly, and does one thing at a time.

    Args:
        source: number and incarnation.
        world: gives times and takes events.

    """

    __slots__ = (
        "_ahead",
        "_busy",
        "_earliest",
        "_evaluated",
        "_longest",
        "_merged",
        "_next",
        "_proved",
        "_replays",
        "_reported",
        "_restored",
        "_samples",
        "_samples_ahead",
        "_seconds",
        "_state_came",
        "_version",
        "_weights",
        "_world",
        "alive",
        "leaving",
        "plan",
        "round",
        "source",
    )

    def __init__(self, source: Source, world: Surroundings) -> None:
        self.source = source
        self._world = world
        self.alive = True
        self.leaving = False
        self.round = self._earliest = 0
        """Round that it is in, and the earliest that it may enter next."""
        self._version: WeightsVersion | None = None
        """Version of the weights that it has merged; None before the first."""
        self.plan: Plan | None = None
        """Newest plan; None before the first."""
        self._longest: Plan | None = None
        """Version of the round's plan with the most samples: the worker may have trained on samples cut off later."""
        self._ahead: Plan | None = None
        """Plan whose delta is delivered, so that the worker trains ahead; None before the first delta."""
        self._samples_ahead = 0
        self._weights: dict[WeightsVersion, bool] = {}
        """Versions received and not merged, each with whether it has all fragments."""
        self._next: int | None = None
        """Round whose weights the worker waits for; None if the next round is unknown."""
        self._replays = world.job.run.mode == "replay"
        self._merged = self._evaluated = self._proved = self._restored = self._state_came = False
        self._busy: object | None = None
        self._samples = self._reported = 0
        self._seconds = 0.0
        """Time of the batches since the last report."""

    # ── orders ────────────────────────────────────────────────────────────────────────────────────────────────────

    def boot(self, layout: str) -> None:
        """Begin with a model of that layout."""
        batch_size = self._world.batch_size(self.source)
        self._send(Ready(self.source, layout, "cpu", 1, batch_size))
        self._pulse()
        self.go()

    def order(self, command: c.Order) -> None:
        """Accept an order, as the control thread does."""
        match command:
            case c.Assign(plan=plan):
                newest_plan = self.plan
                if newest_plan is None or (plan.round, plan.version) > (newest_plan.round, newest_plan.version):
                    self.plan = plan
            case c.Merge(version=version, whole=whole):
                may_be_late = self._world.job.sync.in_flight > 1
                is_next_version = self._version is not None and self._version >= version - 1
                assert whole or may_be_late or is_next_version, "a difference to weights that it doesn't have"
                if self._lacks(version):
                    self._weights[version] = whole
            case c.RestoreInnerState():
                self._state_came = True
            case c.Drain(reason=reason):
                self.leave(reason)
        self.go()

    def leave(self, reason: str) -> None:
        """End the batch, deliver what is done, and leave."""
        if self.alive and not self.leaving:
            self.leaving = True
            self._send(Leaving(self.source, reason))
            if not self._samples:
                self._busy = None  # The worker ends at once unless it is training.
            self.go()

    # ── the inner loop ────────────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        """Do all that takes no time, until the worker is busy or has to wait."""
        while self.alive and self._busy is None and self._step():
            pass

    def _step(self) -> bool:
        plan = self.plan
        if self.leaving:
            self._send(Left(self.source))
            self.alive = False
        elif not self._merged:
            if self._ahead is None or self._ahead.round != self.round:
                samples_to_train = 0
            else:
                samples_to_train = samples_of(self._ahead.ahead)
            if self._samples_ahead == samples_to_train:
                return self._enter_next_round()
            self._spend_batch(self._world.batch_s(self.source), self._train_ahead)
        elif plan is None or plan.round < self.round:
            return False
        elif plan.round > self.round:
            self._merged = False
            return True
        elif plan.evaluate and not self._evaluated:
            self._spend(self._world.evaluate_s(self.source), self._evaluate)
        elif plan.final:
            self.alive = False
        elif plan.spans:
            self._begin(plan)
        return False

    def _enter_next_round(self) -> bool:
        """Merge the weights due in the next round; return whether the worker is in it."""
        if self._next is None:
            if self.plan is None or self.plan.round < self._earliest:
                return False
            self._next = self.plan.round
        version = version_due(self._world.job, self._next)
        while self._lacks(version):
            if not self._merge(version):
                return False
        self.round = self._next
        self._next = None
        self._merged = True
        self._evaluated = False
        self._earliest = self.round + 1
        return True

    def _lacks(self, version: WeightsVersion) -> bool:
        return self._version is None or self._version < version

    def _merge(self, due_version: WeightsVersion) -> bool:
        """Merge received weights on the way to the version that is due; False if there are none to merge."""
        if not self._weights:
            return False
        complete_versions = [version for version, is_whole in self._weights.items() if is_whole]
        not_newer = [version for version in complete_versions if version <= due_version]
        following = None if self._version is None else WeightsVersion(self._version + 1)
        if not not_newer and following is not None and following in self._weights:
            version = following
        elif complete_versions:
            version = max(not_newer or complete_versions)
        else:
            return False
        self._version = version
        for received in list(self._weights):
            if received <= version:
                del self._weights[received]
        proof = None if self._proved else self._world.theta_sha256(self.source, version)
        self._proved = True
        self._send(Merged(self.source, version, proof))
        return True

    def _evaluate(self) -> None:
        self._evaluated = True
        assert self.plan is not None
        samples = samples_of(self.plan.evaluate)
        self._send(self._evaluation(samples))

    def _evaluation(self, samples: int) -> Evaluated:
        sums = {"val_loss": (2.0 * samples, float(samples))}
        return Evaluated(self.source, self.round, sums, self._world.evaluate_s(self.source))

    def _begin(self, plan: Plan) -> None:
        """Begin to train, once the inner state that the plan asks for has arrived."""
        if plan.restores and not self._restored:
            if not self._state_came:
                return
            self._restore()
        self._samples = self._reported = 0
        self._seconds = 0.0
        self._longest = plan
        if self._ahead is not None and self._ahead.round == plan.round - 1:
            self._samples = self._samples_ahead
            assert window(plan.spans, 0, self._samples) == self._ahead.ahead, "it has begun with other samples"
        self._ahead = None
        self._samples_ahead = 0
        if self._samples < plan.samples:
            self._train(plan)
        else:
            self._hand_over()

    def _restore(self) -> None:
        """Take over its predecessor's inner state, once."""
        self._restored = True

    def _train_ahead(self) -> None:
        assert self._ahead is not None
        untrained = samples_of(self._ahead.ahead) - self._samples_ahead
        self._samples_ahead += min(self._ahead.batch_size, untrained)

    def _train(self, plan: Plan) -> None:
        assert self._longest is not None
        self._longest = max(self._longest, plan, key=attrgetter("samples"))
        batch_samples = min(plan.batch_size, plan.samples - self._samples)
        seconds = self._world.batch_s(self.source)
        self._spend_batch(seconds, partial(self._trained, batch_samples, seconds))

    def _trained(self, batch_samples: int, seconds: float) -> None:
        """End a batch."""
        assert self.plan is not None
        self._samples += batch_samples
        self._seconds += seconds
        if self.leaving:
            if not self._replays:
                self._hand_over()
        elif self.plan.round != self.round:
            self._samples = 0
            self._merged = False
        elif self._samples < self.plan.samples:
            batches = (self._samples - self._reported) / batch_samples
            remaining_batches = (self.plan.samples - self._samples) / batch_samples
            if self._world.report_due(self._seconds, batches, remaining_batches):
                self._report(self.plan)
            self._train(self.plan)
        else:
            self._hand_over()

    def _report(self, plan: Plan) -> None:
        samples = self._samples - self._reported
        self._reported = self._samples
        self._seconds = 0.0
        batches = -(-samples // plan.batch_size)
        seconds = self._reported_s(batches)
        figures = (batches, samples, samples, samples, 3.0 * samples, seconds, batches, 0.0, 1e-3)
        self._send(Report(self.source, self.round, *figures))

    def _hand_over(self) -> None:
        """Report the rest and send the delta."""
        assert self._longest is not None
        if self._samples > self._reported:
            self._report(self._longest)
        self._send(self._delta(self._longest))
        self._samples = 0
        self._merged = False
        self._ahead = self.plan
        self._samples_ahead = 0

    def _delta(self, plan: Plan) -> Delta:
        samples = self._samples
        spans = plan.spans if samples == plan.samples else window(plan.spans, 0, samples)
        batches = -(-samples // plan.batch_size)
        seconds = self._delivered_s(batches)
        figures = (samples, samples, samples, batches, 3.0, 1, self._payload_bytes(), seconds, 0.0)
        return Delta(self.source, self.round, spans, *figures, inner_state=self._replays)

    def _reported_s(self, batches: int) -> float:
        """Seconds of the batches that a report counts."""
        return batches * self._world.batch_s(self.source)

    def _delivered_s(self, batches: int) -> float:
        """Seconds of a delta's batches."""
        return batches * self._world.batch_s(self.source)

    def _payload_bytes(self) -> int:
        """Bytes of a delta."""
        return 1000

    def _spend_batch(self, seconds: float, on_end: Callable[[], None]) -> None:
        """Be busy with a batch."""
        self._spend(seconds, on_end)

    def _spend(self, seconds: float, on_end: Callable[[], None]) -> None:
        """Be busy for a while; an order to leave may end that."""
        token = self._busy = object()
        self._world.later(seconds, partial(self._end_if_busy, token, on_end))

    def _end_if_busy(self, token: object, on_end: Callable[[], None]) -> None:
        if self.alive and self._busy is token:
            self._busy = None
            on_end()
            self.go()

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, event: Event) -> None:
        self._world.say(self, event)

    def _pulse(self) -> None:
        if self.alive:
            self._send(Alive(self.source))
            self._world.later(self._world.pulse_s(), self._pulse)
