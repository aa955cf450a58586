"""The inner loop: merge the global weights, evaluate, train on the plan's spans, hand over the result. No RPC."""

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
from hypha_ray.exchange_schedule import ReportSchedule, fragments_of_round, is_last_round, version_due
from hypha_ray.failpoints import failpoint
from hypha_ray.model.environment import take_peak_memory
from hypha_ray.model.execution import peak_operations, resolved_job, token_operations
from hypha_ray.model.layout import layout_of
from hypha_ray.model.task import SpecialTokens
from hypha_ray.optim.schedules import position
from hypha_ray.optim.step import PendingStep, Step
from hypha_ray.store.snapshots import digest, named
from hypha_ray.traces import RoundKey, traced
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
    by_responder,
    window,
)
from hypha_ray.types.events import HandOver, working
from hypha_ray.worker.batches import Meter
from hypha_ray.worker.device_encoding import device_encoding
from hypha_ray.worker.faults import Throttle, corrupted
from hypha_ray.worker.incarnation import BatchSource, Emit, Inbox, Retired
from hypha_ray.worker.trainer import LocalWeights, export_inner_state, import_inner_state, strategy, trainer_of

MAX_SKIPPED_BATCHES = 10
"""Batches in a row without a finite gradient, after which a worker gives up."""
MAX_PENDING_STEPS = 4
"""Steps that may be under way before the loop waits for the result of the oldest one."""


class PendingBatch(NamedTuple):
    """Batch whose step has been begun."""

    round: int
    meter: Meter
    text: str
    """Description of its samples, for signs of life."""
    samples: int
    learning_rate: float
    step: PendingStep


class TrainingLoop:
    """One worker's model and its training, on a thread of its own; `emit` takes events and must not block."""

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
        self._encoders = encoders(job.sync, job.outer_optimizer)
        self._sends_differences = sends_differences(job.sync)
        self._device_encoding = device_encoding(job, self._trainer, self._layout, self._encoders)
        self._results: dict[int, Flat] = {}
        """Arrays of the last results, by fragment; they are written again in the next round."""
        self._replay = job.run.mode == "replay"
        self._refills = job.rl.algorithm is not None and job.rl.refill > 0
        self._sends_inner_state = self._replay and (self._strategy.has_state or job.sync.codec != "fp32")
        self._weights_proved = False
        """Whether the scheduler has the hash of the first weights, which proves them right."""
        has_payload_failpoint = any(spec.startswith("worker.payload") for spec in job.testing.failpoints)
        keeps_theta = has_payload_failpoint or self._sends_differences or job.sync.overlaps
        self._weights = LocalWeights(self._trainer, self._layout, job.sync.mixing, keeps_theta)
        self._meter_ahead: Meter | None = None
        """Meter of a round that was begun before its plan and weights arrived; None without one."""
        self._rejections = 0
        """Number of rejected deltas after which the inner state was reset."""
        self._pending: deque[PendingBatch] = deque()
        """Batches whose results haven't been collected, the oldest one first."""
        self._skipped_batches = 0
        """Number of batches in a row without a finite gradient, which were skipped."""
        self._warned_lines: set[str] = set()
        """Warnings that were sent to the user."""
        self._next_round = 0
        """Number of the earliest round that may be trained."""
        self._throttle = Throttle(job, source.worker)

    def run(self) -> None:
        """Train until the final plan, or until the worker has left; raises `Closed` when it is stopped before."""
        try:
            self._inbox.check()
            self._report_ready()
            while self._train_round():
                pass
        except Retired:
            self._emit(Left(self._source))
        finally:
            self._trainer.close()

    def _report_ready(self) -> None:
        layout_hash = self._layout.sha256()
        device = str(self._trainer.device)
        settings, reasons = settings_told(self._job)
        parameters = self._trainer.parameters
        self._emit(Ready(self._source, layout_hash, device, parameters, self._batch_size, settings, reasons))

    def _train_round(self) -> bool:
        """Go through one round, idle or not; False after the final plan."""
        first_plan = self._await_next_round()
        is_evaluated = False
        self._reset_if_rejected(first_plan)
        plan: Plan | None = first_plan
        while plan is not None and plan.round == first_plan.round:
            if plan.evaluate and not is_evaluated:
                self._evaluate(plan)
                is_evaluated = True
            if plan.final:
                return False
            if plan.spans:
                self._train(plan)
                return True
            plan = self._inbox.correction(plan)
        return True

    def _reset_if_rejected(self, plan: Plan) -> None:
        """After a rejected delta, reset the optimizer's state and the codec's residuals."""
        if plan.rejections > self._rejections:
            self._rejections = plan.rejections
            self._optimizer.reset()
            for encoder in self._encoders:
                encoder.residual.clear()
            if self._device_encoding is not None:
                self._device_encoding.forget()

    def _await_next_round(self) -> Plan:
        """Wait for the next round's plan, and merge the weights that are needed in it."""
        wait_began = time.monotonic()
        plan = self._inbox.plan(self._next_round)
        self._next_round = plan.round + 1
        needed_version = version_due(self._job, plan.round)
        while self._inbox.lacks(needed_version):
            self._merge_weights(needed_version, wait_began)
            wait_began = time.monotonic()
        return plan

    def _merge_weights(self, needed_version: WeightsVersion, wait_began: float) -> None:
        """Copy newer weights into the live parameters: those of the needed version, or of one before it."""
        new_weights = self._inbox.weights(needed_version)
        wait_s = time.monotonic() - wait_began
        is_warmup = new_weights.version <= self._job.rounds.warmup_rounds
        made_in = new_weights.version - 1 if self._weights_proved else new_weights.version
        with traced("merge", self._key(made_in), worker=self._source.worker):
            mixed_fragments = self._weights.merge(new_weights, mixes=not is_warmup)
            if self._device_encoding is not None:
                self._device_encoding.take(new_weights.fragments, mixed_fragments)
            self._trainer.merged(new_weights.version)
        if self._weights_proved:
            self._emit(Merged(self._source, new_weights.version, None, wait_s))
            return
        theta = [new_weights.fragments[fragment] for fragment in sorted(new_weights.fragments)]
        self._emit(Merged(self._source, new_weights.version, digest(named(self._layout, theta)), None))
        self._weights_proved = True

    def _evaluate(self, plan: Plan) -> None:
        began_at = time.monotonic()
        key = self._key(version_due(self._job, plan.round) - 1)
        with traced("evaluation", key, worker=self._source.worker), self._weights.with_global_weights():
            sums = self._trainer.evaluate(self._validation(plan))
        seconds = time.monotonic() - began_at
        self._emit(Evaluated(self._source, plan.round, sums, seconds))

    def _validation(self, plan: Plan) -> Iterator[Samples]:
        samples = sum(span.samples for span in plan.evaluate)
        for start in range(0, samples, plan.batch_size):
            batch_samples = min(plan.batch_size, samples - start)
            yield self._batch_source.batch(plan.evaluate, start, batch_samples, shuffled=False)

    def _train(self, plan: Plan) -> None:
        """Take one round's steps. The plan may be corrected meanwhile; if the fleet has moved on, the round is dropped.

        A worker that is leaving hands over its partial result, except in replay mode, where its successor repeats the
        round.
        """
        round_number = plan.round
        longest = plan
        self._restore_inner_state(plan)
        meter = self._meter_ahead
        self._meter_ahead = None
        if meter is None or meter.round != round_number:
            meter = self._begin_round(round_number)
        try:
            with traced("training", self._key(round_number), worker=self._source.worker):
                plan = self._inbox.plan(round_number)
                while plan.round == round_number and meter.begun < plan.samples:
                    if plan.samples > longest.samples:
                        longest = plan
                    self._train_batch(plan, meter)
                    plan = self._inbox.plan(round_number)
                self._collect_results()
        except Retired:
            if meter.begun and not self._replay:
                self._hand_over(longest, meter)
            raise
        if plan.round == round_number:
            self._hand_over(longest, meter)
            self._train_ahead(plan)

    def _begin_round(self, round_number: int) -> Meter:
        """Begin a round, with random numbers that don't depend on earlier ones: so it can be repeated."""
        self._trainer.seed(self._job.run.seed, round_number, self._source.worker)
        self._strategy.begin()
        return Meter(self._source, round_number, ReportSchedule.of(self._job))

    def _train_ahead(self, plan: Plan) -> None:
        """Overlap: train on the next round's samples until the result of the last hand-over is needed."""
        if not plan.ahead:
            return
        self._meter_ahead = meter = self._begin_round(plan.round + 1)
        ahead_plan = replace(plan, round=plan.round + 1, spans=plan.ahead)
        with traced("training", self._key(plan.round), worker=self._source.worker, for_round=ahead_plan.round):
            while meter.begun < ahead_plan.samples:
                self._inbox.check()
                self._train_batch(ahead_plan, meter, plan.samples)
            self._collect_results()
        meter.pause()

    def _restore_inner_state(self, plan: Plan) -> None:
        """Continue with the predecessor's inner state, if the plan says so."""
        if not plan.restores:
            return
        state = self._inbox.state()
        if state is not None:
            import_inner_state(self._trainer, self._encoders, state)

    def _train_batch(self, plan: Plan, meter: Meter, round_samples: int | None = None) -> None:
        """Train on the plan's next batch; `round_samples` is the size of the round, None: the plan's."""
        start = meter.begun
        batch_samples = min(plan.batch_size, plan.samples - start)
        with meter.waiting():
            batch = self._batch_source.batch(plan.spans, start, batch_samples)
            waits = self._replay or self._refills
            upcoming_batches = self._batch_source.upcoming(plan.spans, start + batch_samples, plan.batch_size, waits)
            self._trainer.announce(upcoming_batches)
        began_at = time.monotonic()
        # All workers go through the schedule together, by parts of the round: a fast one isn't ahead.
        self._optimizer.seek(position(self._job, plan, start / (round_samples or plan.samples)))
        learning_rate = self._optimizer.learning_rate  # Read before the step, which advances the schedule.
        self._weights.mark_changed()
        text = _describe_samples(batch)
        with working(text):
            step = self._strategy.begin_step(batch)
            if self._throttle.slows:
                step.result()
            if self._refills:
                batch_samples += step.result().extra
        self._throttle.wait(time.monotonic() - began_at)
        meter.begun += batch_samples
        meter.planned = plan.samples
        self._pending.append(PendingBatch(plan.round, meter, text, batch_samples, learning_rate, step))
        self._collect_results(MAX_PENDING_STEPS)
        failpoint("worker.step", self._source.worker)

    def _collect_results(self, most_pending: int = 0) -> None:
        """Record the results that are ready, and wait for others until at most `most_pending` steps are left."""
        while self._pending and (len(self._pending) > most_pending or self._pending[0].step.ready):
            batch = self._pending.popleft()
            with working(batch.text):
                result = batch.step.result()
            self._record_result(batch, result)

    def _record_result(self, batch: PendingBatch, result: Step) -> None:
        """Count a batch and its result, and emit the events that follow from it."""
        round_number = batch.round
        meter = batch.meter
        meter.step(result, batch.samples, batch.learning_rate)
        self._report_damage(round_number, result)
        if result.shown and meter.batches == 1:
            self._emit(RolloutReport(self._source, round_number, result.shown))
        if result.revived:
            self._emit(ModelWorkersRevived(self._source, round_number, result.revived))
        self._warn_user(round_number, result.problems, result.disabled)
        if meter.due and meter is not self._meter_ahead:
            self._emit(meter.report())

    def _warn_user(self, round_number: int, problems: tuple[str, ...], disabled: tuple[str, ...]) -> None:
        """Warn the user of problems beside the training, of each one once, and of settings that they disabled."""
        new_lines: list[str] = []
        for line in problems:
            if line not in self._warned_lines:
                self._warned_lines.add(line)
                new_lines.append(line)
        if new_lines:
            self._emit(WorkerWarned(self._source, round_number, tuple(new_lines), disabled))

    def _report_damage(self, round_number: int, result: Step) -> None:
        """Report samples that were left out; too many skipped batches in a row end the run.

        Raises:
            ConfigError: TRN002.

        """
        if result.scored:
            self._skipped_batches = 0
        if not len(result.bad):
            return
        samples = tuple((int(index), int(sample)) for _, index, sample in result.bad)
        self._emit(Damaged(self._source, round_number, samples, whole=not result.scored))
        if not result.scored:
            self._skipped_batches += 1
        if self._skipped_batches >= MAX_SKIPPED_BATCHES:
            count = self._skipped_batches
            problem = f"{count} batches in a row had no finite gradient: training diverged, or the data is damaged"
            names = ", ".join(f"sample {sample} of slice {index}" for index, sample in samples[:3])
            fix = "lower inner_optimizer.learning_rate; or set dataset.allow_quarantine to leave single samples out"
            raise ConfigError("TRN002", problem, names, fix=fix)

    def _hand_over(self, plan: Plan, meter: Meter) -> None:
        """Emit the last report, the delta, its payloads, and the inner state if a successor needs it."""
        self._collect_results()
        if meter.pending:
            self._emit(meter.report())
        failpoint("worker.before_delta", self._source.worker)
        train_s = meter.train_s
        fragments = fragments_of_round(self._job, plan.round)
        is_last = is_last_round(self._job, plan.round)
        payloads: list[Flat] = []
        quality = Quality()
        with traced("encode", self._key(plan.round), worker=self._source.worker):
            for fragment in fragments:
                payload, fragment_quality = self._encode_result(fragment, is_last)
                payloads.append(payload)
                quality += fragment_quality
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
            inner_state=self._sends_inner_state,
            quality=(quality.error, quality.cosine),
            sums=meter.sums,
            responders=by_responder(meter.responders),
            token_operations=self._token_operations,
            peak_operations=self._peak_operations,
            peak_memory_bytes=take_peak_memory(self._trainer.device),
        )
        parts = payloads
        if self._sends_inner_state:
            parts = [*payloads, export_inner_state(self._trainer, self._encoders)]
        result = HandOver(delta, parts)
        action = failpoint("worker.payload", self._source.worker)
        if action is None:
            self._emit(result)
            return
        theta = [self._weights.theta[fragment] for fragment in fragments]
        for corrupted_result in corrupted(action, result, theta):
            self._emit(corrupted_result)

    def _key(self, round_number: int) -> RoundKey:
        """Round of a span."""
        return RoundKey(self._source.attempt, round_number)

    def _encode_result(self, fragment: int, is_last: bool) -> tuple[Flat, Quality]:
        """Encode a fragment's result, or its last one, on the model's device if that is possible.

        The arrays of the last result are free, because new weights arrive only after that result was read.
        """
        if self._device_encoding is not None:
            encoded = self._device_encoding.payload(fragment, self._results)
            if encoded is not None:
                return encoded
        result = self._strategy.result(self._layout, fragment, self._results.get(fragment))
        if self._strategy.has_state:
            result = self._weights.add_rounding_error(fragment, result)
        self._results[fragment] = result
        theta = None
        if self._sends_differences and self._weights.theta:
            theta = self._weights.theta[fragment]
        return self._encoders[fragment].encode(result, theta, is_last)


def _describe_samples(batch: Samples) -> str:
    """Name the samples of a batch by its first and last one."""
    if not len(batch.keys):
        return ""
    _, first_slice, first_index = batch.keys[0]
    _, last_slice, last_index = batch.keys[-1]
    return f"samples {first_index} of slice {first_slice} to {last_index} of slice {last_slice}"
