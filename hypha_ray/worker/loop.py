"""The inner loop: merge the global weights, evaluate, train on the plan's spans, hand over the result. Never an RPC."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hypha_ray.codec import encoded, encoders, payload_bytes, sends_differences
from hypha_ray.config import Job
from hypha_ray.failpoints import failpoint
from hypha_ray.model.layout import layout_of, scatter
from hypha_ray.optim.schedules import steps_per_round
from hypha_ray.store.tensorfile import digest, named
from hypha_ray.types import Delta, Evaluated, Flat, Left, Merged, Plan, Ready, Source, window
from hypha_ray.worker.bequest import bequest, inherit
from hypha_ray.worker.desk import Desk
from hypha_ray.worker.feeder import Arrays, Feeder
from hypha_ray.worker.meter import Meter
from hypha_ray.worker.stepper import Stepper
from hypha_ray.worker.stint import Emit
from hypha_ray.worker.strategies import strategy
from hypha_ray.worker.tamper import tampered
from hypha_ray.worker.waits import Retired


class InnerLoop:
    """One worker's model and its training, on a thread of its own.

    Args:
        job: the job file.
        source: who this worker is.
        feeder: where batches come from.
        desk: where plans and weights come from.
        emit: takes events and payloads; must not block.

    """

    def __init__(self, job: Job, source: Source, feeder: Feeder, desk: Desk, emit: Emit) -> None:
        self._job, self._source = job, source
        self._feeder, self._desk, self._emit = feeder, desk, emit
        self._stepper = Stepper(job)
        self._model, self._optimizer = self._stepper.model, self._stepper.optimizer
        self._strategy = strategy(job, self._stepper)
        self._layout = layout_of(self._model, job.sync.fragments)
        self._steps_per_round = steps_per_round(job)
        """All workers go through the schedule together, by parts of the round: a fast one isn't ahead."""
        self._encoders, self._relative = encoders(job.sync), sends_differences(job.sync)
        self._results: list[Flat] = []
        self._replay = job.run.mode == "replay"
        self._bequeaths = self._replay and (self._strategy.has_state or job.sync.codec != "fp32")
        self._proved = False
        """The scheduler knows by their hash that the first weights were the right ones."""
        self._theta: list[Flat] = []
        """The round's global weights, by fragment, where payloads are made with them, or damaged by a failpoint."""
        self._tampers = any(spec.startswith("worker.payload") for spec in job.testing.failpoints)
        slowdown = job.testing.slowdown
        self._slowdown = slowdown[source.worker] if source.worker < len(slowdown) else 1.0

    def run(self) -> None:
        """Train until the final plan, or until the worker has left; raises `Closed` when it is stopped before."""
        try:
            self._desk.check()
            built = self._layout.sha256(), str(self._stepper.device), self._stepper.parameters
            self._emit(Ready(self._source, -1, *built))
            while self._round():
                pass
        except Retired:
            self._emit(Left(self._source, self._desk.round))

    def _round(self) -> bool:
        """Go through one round, idle or not; False after the final plan."""
        number = self._merge()
        plan: Plan | None = self._desk.plan(number)
        evaluated = False
        while plan is not None and plan.round == number:
            if plan.evaluate and not evaluated:
                self._evaluate(plan)
                evaluated = True
            if plan.final:
                return False
            if plan.spans:
                self._train(plan)
                return True
            plan = self._desk.correction(plan)
        return True

    def _merge(self) -> int:
        """Copy the next round's weights into the live parameters; returns the round."""
        number, weights = self._desk.weights()
        began = time.monotonic()
        for fragment, flat in weights.items():
            scatter(self._model, self._layout, fragment, flat)
        merge_s = time.monotonic() - began
        theta = [weights[fragment] for fragment in range(self._layout.fragments)]
        sha256 = None if self._proved else digest(named(self._layout, theta))
        self._proved = True
        self._emit(Merged(self._source, number, merge_s, sha256))
        self._theta = theta if self._tampers or self._relative else []
        return number

    def _evaluate(self, plan: Plan) -> None:
        began = time.monotonic()
        sums = self._stepper.evaluate(self._validation(plan))
        seconds = time.monotonic() - began
        self._emit(Evaluated(self._source, plan.round, sums.loss_sum, sums.count, sums.correct, seconds))

    def _validation(self, plan: Plan) -> Iterator[Arrays]:
        samples = sum(span.samples for span in plan.evaluate)
        for start in range(0, samples, plan.batch_size):
            size = min(plan.batch_size, samples - start)
            yield self._feeder.batch(plan.evaluate, start, size, shuffled=False)

    def _train(self, plan: Plan) -> None:
        """One round's steps. The plan may be corrected meanwhile; if the fleet has moved on, the round is dropped.

        A worker that is leaving hands over what it has done, but for replay mode: there a successor does all of it.
        """
        number, longest = plan.round, plan
        self._restore(plan)
        # So that a round can be repeated: nothing random in it depends on what was before.
        self._stepper.seed(self._job.run.seed, number, self._source.worker)
        self._strategy.begin()
        meter = Meter(self._source, number, self._job.worker.report_every_s)
        try:
            while (plan := self._desk.plan(number)).round == number and meter.samples < plan.samples:
                longest = max(longest, plan, key=lambda one: one.samples)
                self._batch(plan, meter)
        except Retired:
            if meter.samples and not self._replay:
                self._hand_over(longest, meter)
            raise
        if plan.round == number:
            self._hand_over(longest, meter)

    def _restore(self, plan: Plan) -> None:
        """Take the predecessor's optimizer state over, where the plan asks for that."""
        if plan.restores and (state := self._desk.state()) is not None:
            inherit(self._optimizer, self._encoders, state)

    def _batch(self, plan: Plan, meter: Meter) -> None:
        """Train on the plan's next batch."""
        done = meter.samples
        size = min(plan.batch_size, plan.samples - done)
        with meter.waiting():
            batch = self._feeder.batch(plan.spans, done, size)
        began = time.monotonic()
        self._optimizer.seek(self._steps_per_round * plan.round + self._steps_per_round * done / plan.samples)
        loss, norm = self._strategy.train(batch)
        self._drag(time.monotonic() - began)
        meter.step(loss, norm, size, _tokens(batch), self._optimizer.learning_rate)
        if meter.due:
            self._emit(meter.report())
        failpoint("worker.step", self._source.worker)

    def _hand_over(self, plan: Plan, meter: Meter) -> None:
        """Emit the last report, the delta, and what belongs to it."""
        if meter.pending:
            self._emit(meter.report())
        failpoint("worker.before_delta", self._source.worker)
        train_s = meter.train_s
        # The arrays of the last round are free: its result couldn't have been merged before they were read.
        self._results = [
            self._strategy.result(self._layout, fragment, out)
            for fragment, out in enumerate(self._results or [None] * self._layout.fragments)
        ]
        payloads, quality = encoded(self._encoders, self._results, self._theta if self._relative else ())
        delta = Delta(
            source=self._source,
            round=plan.round,
            spans=window(plan.spans, 0, meter.samples),
            samples=meter.samples,
            tokens=meter.tokens,
            batches=meter.batches,
            loss=meter.loss,
            fragments=len(payloads),
            payload_bytes=sum(payload_bytes(payload) for payload in payloads),
            train_s=train_s,
            data_wait_s=meter.data_wait_s,
            inner_state=self._bequeaths,
            quality=(quality.error, quality.cosine),
        )
        parts = [*payloads, *([bequest(self._optimizer, self._encoders)] if self._bequeaths else [])]
        action = failpoint("worker.payload", self._source.worker)
        items: list[Delta | Flat] = [delta, *parts] if action is None else tampered(action, delta, parts, self._theta)
        for item in items:
            self._emit(item)

    def _drag(self, step_s: float) -> None:
        """Play a slower machine, where a test asks for one."""
        wait_s = max((self._slowdown - 1) * step_s, (self._job.testing.batch_s or 0.0) - step_s)
        if wait_s > 0:
            time.sleep(wait_s)


def _tokens(batch: Arrays) -> int:
    """Tokens of a language batch; samples of any other."""
    return batch["input_ids"].size if "input_ids" in batch else len(next(iter(batch.values())))
