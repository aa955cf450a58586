"""The inner loop: merge the global weights, evaluate, train on the plan's spans, hand over the result. Never an RPC."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hypha_ray.codec import Quality, encoders, payload_bytes, sends_differences
from hypha_ray.config import Job
from hypha_ray.config.automatic import settings_told
from hypha_ray.errors import ConfigError
from hypha_ray.exchange_schedule import fragments_of_round, version_due
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import take_peak_memory
from hypha_ray.model.execution import resolved_job
from hypha_ray.model.layout import layout_of
from hypha_ray.model.tasks.task import SpecialTokens
from hypha_ray.optim.schedules import position
from hypha_ray.optim.step import PendingStep, Step
from hypha_ray.store.tensorfile import digest, named
from hypha_ray.types import (
    Damaged,
    Delta,
    Evaluated,
    Flat,
    Left,
    Merged,
    ModelWorkersRevived,
    Plan,
    Ready,
    RolloutReport,
    Samples,
    Source,
    WeightsVersion,
    WorkerWarned,
    window,
)
from hypha_ray.types.current_work import working
from hypha_ray.worker.inbox import BatchSource, Inbox
from hypha_ray.worker.incarnation import Emit
from hypha_ray.worker.interrupts import Retired
from hypha_ray.worker.training.device_encoding import device_encoding
from hypha_ray.worker.training.faults import Throttle, corrupted
from hypha_ray.worker.training.local_state import LocalWeights, export_inner_state, import_inner_state
from hypha_ray.worker.training.meter import Meter, peak_operations, token_operations
from hypha_ray.worker.training.trainer import strategy, trainer_of

LONGEST_VAIN = 10
"""Batches in a row without a finite gradient after which a worker gives up."""
MOST_PENDING = 4
"""Steps that may have been begun before the result of an earlier one is waited for."""


class Begun(NamedTuple):
    """Step of a round that has been begun."""

    round: int
    meter: Meter
    work: str
    """Name of its samples."""
    samples: int
    rate: float
    step: PendingStep


class TrainingLoop:
    """One worker's model and its training, on a thread of its own.

    Args:
        job: the job file.
        source: number and incarnation of this worker.
        batch_source: where batches come from.
        inbox: where plans and weights come from.
        emit: takes events and payloads; must not block.
        specials: special tokens or whole tokenizer, as `trainer_of` takes them.
        batch_size: largest batch that fits into the worker's lease; None if that wasn't tried.

    """

    def __init__(
        self,
        job: Job,
        source: Source,
        batch_source: BatchSource,
        inbox: Inbox,
        emit: Emit,
        specials: SpecialTokens | None = None,
        batch_size: int | None = None,
    ) -> None:
        job = resolved_job(job)
        self._job = job
        self._source = source
        self._batch_size = batch_size
        self._batch_source = batch_source
        self._inbox = inbox
        self._emit = emit
        self._trainer = trainer_of(job, source.worker, specials, job.processes_of(source.worker))
        self._model = self._trainer.model
        self._optimizer = self._trainer.optimizer
        self._token_operations = token_operations(job, self._model, self._trainer.parameters)
        self._peak_operations = peak_operations(job.group_of(source.worker), self._trainer.device)
        self._strategy = strategy(job, self._trainer)
        self._layout = layout_of(self._model, job.sync.fragments, job.sync.partition)
        self._encoders = encoders(job.sync)
        self._relative = sends_differences(job.sync)
        self._device_encoding = device_encoding(job, self._trainer, self._layout, self._encoders)
        self._results: dict[int, Flat] = {}
        """Arrays that results were made in, by fragment."""
        self._replay = job.run.mode == "replay"
        self._bequeaths = self._replay and (self._strategy.has_state or job.sync.codec != "fp32")
        self._proved = False
        """The scheduler knows by their hash that the first weights were the right ones."""
        self._tampers = any(spec.startswith("worker.payload") for spec in job.testing.failpoints)
        keeps = self._tampers or self._relative or job.sync.overlaps
        self._weights = LocalWeights(self._trainer, self._layout, job.sync.mixing, keeps)
        self._begun: Meter | None = None
        """Meter of a round that was begun before its plan and its weights were there."""
        self._rejections = 0
        """Rejected deltas that the inner state has been reset for."""
        self._pending: deque[Begun] = deque()
        """Steps that have been begun and whose results aren't taken in, the oldest one first."""
        self._vain = 0
        """Batches in a row that were skipped for want of a finite gradient."""
        self._told: set[str] = set()
        """Lines that the user was told."""
        self._next = 0
        """The earliest round that may be trained."""
        self._throttle = Throttle(job, source.worker)

    def run(self) -> None:
        """Train until the final plan, or until the worker has left; raises `Closed` when it is stopped before."""
        try:
            self._inbox.check()
            built = self._layout.sha256(), str(self._trainer.device), self._trainer.parameters
            self._emit(Ready(self._source, *built, self._batch_size, *settings_told(self._job)))
            while self._round():
                pass
        except Retired:
            self._emit(Left(self._source))
        finally:
            self._trainer.close()

    def _round(self) -> bool:
        """Go through one round, idle or not; False after the final plan."""
        begun = self._go_to_next()
        evaluated = False
        self._begin_anew_if_rejected(begun)
        plan: Plan | None = begun
        while plan is not None and plan.round == begun.round:
            if plan.evaluate and not evaluated:
                self._evaluate(plan)
                evaluated = True
            if plan.final:
                return False
            if plan.spans:
                self._train(plan)
                return True
            plan = self._inbox.correction(plan)
        return True

    def _begin_anew_if_rejected(self, plan: Plan) -> None:
        """Forget the optimizer's state and what payloads have left out, if what came of them was rejected."""
        if plan.rejections > self._rejections:
            self._rejections = plan.rejections
            self._optimizer.reset()
            for encoder in self._encoders:
                encoder.residual.clear()
            if self._device_encoding is not None:
                self._device_encoding.forget()

    def _go_to_next(self) -> Plan:
        """Wait for the next round's plan, and merge the weights that are due in it."""
        asked = time.monotonic()
        plan = self._inbox.plan(self._next)
        self._next = plan.round + 1
        while self._inbox.lacks(due := version_due(self._job, plan.round)):
            self._merge(due, asked)
            asked = time.monotonic()
        return plan

    def _merge(self, due: WeightsVersion, asked: float) -> None:
        """Copy newer weights into the live parameters, on the way to the version that is due; waits since `asked`."""
        arrived = self._inbox.weights(due)
        began = time.monotonic()
        mixed = self._weights.merge(arrived, mixes=arrived.version > self._job.rounds.warmup_rounds)
        if self._device_encoding is not None:
            self._device_encoding.take(arrived.fragments, mixed)
        self._trainer.merged(arrived.version)
        theta = [flat for _, flat in sorted(arrived.fragments.items())]
        sha256 = None if self._proved else digest(named(self._layout, theta))
        self._emit(Merged(self._source, arrived.version, sha256, began - asked if self._proved else None))
        self._proved = True

    def _evaluate(self, plan: Plan) -> None:
        began = time.monotonic()
        with self._weights.global_weights():
            sums = self._trainer.evaluate(self._validation(plan))
        seconds = time.monotonic() - began
        self._emit(Evaluated(self._source, plan.round, sums, seconds))

    def _validation(self, plan: Plan) -> Iterator[Samples]:
        samples = sum(span.samples for span in plan.evaluate)
        for start in range(0, samples, plan.batch_size):
            size = min(plan.batch_size, samples - start)
            yield self._batch_source.batch(plan.evaluate, start, size, shuffled=False)

    def _train(self, plan: Plan) -> None:
        """One round's steps. The plan may be corrected meanwhile; if the fleet has moved on, the round is dropped.

        A worker that is leaving hands over what it has done, but for replay mode: there a successor does all of it.
        """
        number = plan.round
        longest = plan
        self._restore(plan)
        meter = self._begun
        self._begun = None
        if meter is None or meter.round != number:
            meter = self._begin(number)
        try:
            while (plan := self._inbox.plan(number)).round == number and meter.begun < plan.samples:
                longest = max(longest, plan, key=lambda one: one.samples)
                self._batch(plan, meter)
            self._take_in_results()
        except Retired:
            if meter.begun and not self._replay:
                self._hand_over(longest, meter)
            raise
        if plan.round == number:
            self._hand_over(longest, meter)
            self._go_ahead(plan)

    def _begin(self, number: int) -> Meter:
        """Begin a round. So that it can be repeated, nothing random in it depends on what was before."""
        self._trainer.seed(self._job.run.seed, number, self._source.worker)
        self._strategy.begin()
        return Meter(self._source, number, self._job.report_interval_s)

    def _go_ahead(self, plan: Plan) -> None:
        """Train on what is the next round's in any case, until the result of the one that was handed over is due."""
        if not plan.ahead:
            return
        self._begun = meter = self._begin(plan.round + 1)
        ahead = replace(plan, round=plan.round + 1, spans=plan.ahead)
        while meter.begun < ahead.samples:
            self._inbox.check()
            self._batch(ahead, meter, plan.samples)
        self._take_in_results()
        meter.pause()

    def _restore(self, plan: Plan) -> None:
        """Take the predecessor's optimizer state over, where the plan asks for that."""
        if plan.restores and (state := self._inbox.state()) is not None:
            import_inner_state(self._trainer, self._encoders, state)

    def _batch(self, plan: Plan, meter: Meter, round_samples: int | None = None) -> None:
        """Train on the plan's next batch; the round has so many samples, if not just the plan's."""
        done = meter.begun
        of = round_samples or plan.samples
        size = min(plan.batch_size, plan.samples - done)
        with meter.waiting():
            batch = self._batch_source.batch(plan.spans, done, size)
            upcoming = self._batch_source.upcoming(plan.spans, done + size, plan.batch_size, waits=self._replay)
            self._trainer.announce(upcoming)
        began = time.monotonic()
        # All workers go through the schedule together, by parts of the round: a fast one isn't ahead.
        self._optimizer.seek(position(self._job, plan, done / of))
        rate = self._optimizer.learning_rate  # That of this step: the optimizer goes on to the next one by itself.
        self._weights.mark_changed()
        with working(work := _named(batch)):
            step = self._strategy.begin_step(batch)
            if self._throttle.slows:
                step.result()
        self._throttle.wait(time.monotonic() - began)
        meter.begun += size
        self._pending.append(Begun(plan.round, meter, work, size, rate, step))
        self._take_in_results(MOST_PENDING)
        failpoint("worker.step", self._source.worker)

    def _take_in_results(self, most: int = 0) -> None:
        """Take in the results of steps that are there, and wait for those of all steps but so many."""
        while self._pending and (len(self._pending) > most or self._pending[0].step.ready):
            begun = self._pending.popleft()
            with working(begun.work):
                result = begun.step.result()
            self._take_in(begun, result)

    def _take_in(self, begun: Begun, result: Step) -> None:
        """Count a step and its result, and tell what there is to tell of it."""
        number = begun.round
        meter = begun.meter
        meter.step(result, begun.samples, begun.rate)
        self._see_to_damage(number, result)
        if result.shown and meter.batches == 1:
            self._emit(RolloutReport(self._source, number, result.shown))
        if result.revived:
            self._emit(ModelWorkersRevived(self._source, number, result.revived))
        self._tell(number, result.problems)
        if meter.due and meter is not self._begun:
            self._emit(meter.report())

    def _tell(self, number: int, problems: tuple[str, ...]) -> None:
        """Tell the user of what failed beside the training; each line once."""
        new = tuple(line for line in dict.fromkeys(problems) if line not in self._told)
        self._told.update(new)
        if new:
            self._emit(WorkerWarned(self._source, number, new))

    def _see_to_damage(self, number: int, result: Step) -> None:
        """Name samples that were left out; too many batches in a row end the run.

        Raises:
            ConfigError: TRN002.

        """
        if result.scored:
            self._vain = 0
        if not len(result.bad):
            return
        samples = tuple((int(index), int(sample)) for _, index, sample in result.bad)
        self._emit(Damaged(self._source, number, samples, whole=not result.scored))
        self._vain += not result.scored
        if self._vain >= LONGEST_VAIN:
            what = f"{self._vain} batches in a row had no finite gradient: training diverged, or the data is damaged"
            named = ", ".join(f"sample {sample} of slice {index}" for index, sample in samples[:3])
            fix = "lower inner_optimizer.learning_rate; or set dataset.allow_quarantine to leave single samples out"
            raise ConfigError("TRN002", what, named, fix=fix)

    def _hand_over(self, plan: Plan, meter: Meter) -> None:
        """Emit the last report, the delta, and what belongs to it."""
        self._take_in_results()
        if meter.pending:
            self._emit(meter.report())
        failpoint("worker.before_delta", self._source.worker)
        train_s = meter.train_s
        fragments = fragments_of_round(self._job, plan.round)
        theta = [self._weights.theta[fragment] for fragment in fragments] if self._weights.theta else []
        payloads: list[Flat] = []
        quality = Quality()
        for fragment in fragments:
            payload, own_quality = self._payload(fragment)
            payloads.append(payload)
            quality += own_quality
        delta = Delta(
            source=self._source,
            round=plan.round,
            spans=window(plan.spans, 0, meter.samples),
            samples=meter.samples,
            tokens=meter.tokens,
            scored=meter.scored,
            batches=meter.batches,
            loss=meter.loss,
            fragments=len(payloads),
            payload_bytes=sum(payload_bytes(payload) for payload in payloads),
            train_s=train_s,
            data_wait_s=meter.data_wait_s,
            inner_state=self._bequeaths,
            quality=(quality.error, quality.cosine),
            sums=meter.sums,
            token_operations=self._token_operations,
            peak_operations=self._peak_operations,
            peak_memory_bytes=take_peak_memory(self._trainer.device),
        )
        parts = [*payloads, *([export_inner_state(self._trainer, self._encoders)] if self._bequeaths else [])]
        action = failpoint("worker.payload", self._source.worker)
        items: list[Delta | Flat] = [delta, *parts] if action is None else corrupted(action, delta, parts, theta)
        for item in items:
            self._emit(item)

    def _payload(self, fragment: int) -> tuple[Flat, Quality]:
        """Encode a fragment's result, on the model's device if that is possible.

        Its arrays of the last time are free: that result couldn't have been merged before they were read.
        """
        if self._device_encoding is not None and (made := self._device_encoding.payload(fragment)) is not None:
            return made
        result = self._strategy.result(self._layout, fragment, self._results.get(fragment))
        self._results[fragment] = self._weights.complete(fragment, result) if self._strategy.has_state else result
        theta = self._weights.theta[fragment] if self._relative and self._weights.theta else None
        return self._encoders[fragment].encode(self._results[fragment], theta)


def _named(batch: Samples) -> str:
    """Name the samples of a batch by its first and last one."""
    if not len(batch.keys):
        return ""
    (_, first_slice, first), (_, last_slice, last) = batch.keys[0], batch.keys[-1]
    return f"samples {first} of slice {first_slice} to {last} of slice {last_slice}"
