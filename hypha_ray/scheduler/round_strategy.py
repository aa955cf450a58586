"""State and steps shared by all strategies: the current round, the records, and the end of workers and of the run.

    Waiting ──begin──► Training ──deltas in──► Reducing ──weights of the next round──► Waiting … ──► Evaluating

Each state holds the data that it needs. Without a barrier deltas are reduced while others train: `Training` is followed
by `Waiting`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from hypha_ray.config import Job
from hypha_ray.figures import METRIC, Figure, figures_of, metric_figure
from hypha_ray.model.tasks import find_task
from hypha_ray.plugins import create
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.failures import EvaluationPatience
from hypha_ray.scheduler.messages import Outbox, ResumePoint, RunTotals
from hypha_ray.scheduler.roster import Roster
from hypha_ray.scheduler.worker_plans import WorkerPlans
from hypha_ray.scheduler.worker_state import WorkerState
from hypha_ray.telemetry.round_records import LearningReports
from hypha_ray.telemetry.time_book import TimeBook
from hypha_ray.types import Delta, Evaluated, Merged, Source, Span, Sums, Verdict, WeightsVersion, added, by_responder

R = TypeVar("R")
"""Type of the strategy's rounds."""


@dataclass(slots=True)
class Evaluation:
    """Evaluation of a commit's weights, shared among the workers."""

    weights_round: int
    """Round whose commit has the weights."""
    pending: dict[int, tuple[Span, ...]]
    """Shares that are being evaluated, by worker."""
    lost: list[tuple[Span, ...]] = field(default_factory=list)
    """Shares of lost workers, for workers that join."""
    parts: dict[tuple[Span, ...], Evaluated] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every share is evaluated."""
        return not self.pending and not self.lost

    def take(self, part: Evaluated) -> None:
        """Add a worker's result; one that isn't awaited is ignored."""
        share = self.pending.pop(part.source.worker, None)
        if share is not None:
            self.parts[share] = part

    def lose(self, worker: int) -> None:
        """Put a lost worker's share back."""
        share = self.pending.pop(worker, None)
        if share is not None:
            self.lost.append(share)

    def hand_out(self, worker: int) -> tuple[Span, ...]:
        """Give a lost share to a worker without one; empty if no share is lost."""
        if not self.lost or worker in self.pending:
            return ()
        self.pending[worker] = self.lost.pop()
        return self.pending[worker]

    def record(self, perplexity: bool, metrics: Mapping[str, Figure]) -> dict[str, Any] | None:
        """Figures common to all parts, and the perplexity if wanted; None while a part is missing.

        Args:
            perplexity: whether the loss has a perplexity.
            metrics: the job's own metrics. Their sums may be those of some parts alone, such as of a rare class.

        """
        parts = [part for _, part in sorted(self.parts.items()) if part.has_weight]
        if not parts or not self.complete:
            return None
        common_names = set(parts[0].sums)
        for part in parts[1:]:
            common_names &= part.sums.keys()
        sums: Sums = {}
        count = 0.0
        for name, (total, weight) in added(part.sums for part in parts).items():
            is_metric = name.startswith(METRIC)
            if name in common_names or is_metric:
                sums[name] = total, weight
            if name in common_names and not is_metric:
                count = max(count, weight)
        figures = figures_of(sums, perplexity, metrics)
        seconds = max(part.seconds for part in parts)
        return {"kind": "eval", "round": self.weights_round, **figures, "count": int(count), "seconds": seconds}


class AnyCommittedRound(Protocol):
    """A committed round of some strategy."""

    @property
    def number(self) -> int:
        """Number of the round."""

    @property
    def merging(self) -> set[int]:
        """Workers that have yet to merge its result."""

    def record(self, rounds: int, elapsed_s: float, epoch: int) -> dict[str, Any]:
        """Record of the round in a run of so many `rounds`."""


C = TypeVar("C", bound=AnyCommittedRound)


class PendingRounds(Generic[C]):
    """Committed rounds without a record, and the evaluation in progress."""

    def __init__(
        self,
        job: Job,
        resume_point: ResumePoint,
        tally: RunTotals,
        plans: WorkerPlans,
        times: TimeBook,
        out: Outbox,
    ) -> None:
        self._totals = tally
        self._plans = plans
        self._times = times
        self._out = out
        self._signs = LearningReports()
        self.patience = EvaluationPatience(job.rounds, resume_point.evaluations)
        self._perplexity = (
            find_task(job.model.type).perplexity and job.model.loss is None and job.preference.loss is None
        )
        self._metrics: dict[str, Figure] = {}
        """The job's own metrics, by the names of their figures."""
        for name in job.model.metrics:
            self._metrics[metric_figure(name)] = create("metrics", name).figure
        self.awaiting_merge: deque[C] = deque()
        """Committed rounds, oldest first."""
        self._evaluation: Evaluation | None = None

    # ── the evaluation ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._evaluation is not None

    @property
    def share_is_lost(self) -> bool:
        """Whether a share of the evaluation waits for a joining worker."""
        return self._evaluation is not None and bool(self._evaluation.lost)

    def start_evaluation(self, weights_round: int, shares: Mapping[int, tuple[Span, ...]]) -> None:
        """Start the evaluation of the weights after a round, if there are shares."""
        if shares:
            self._evaluation = Evaluation(weights_round, dict(shares))

    def cancel_evaluation(self) -> None:
        """Give up the evaluation; a part of it makes no record."""
        self._evaluation = None

    def share(self, worker: int, weights_round: int | None) -> tuple[Span, ...]:
        """A worker's share, if the evaluation is of the weights after this round."""
        evaluation = self._evaluation
        if evaluation is None or evaluation.weights_round != weights_round:
            return ()
        return evaluation.pending.get(worker, ())

    def hand_out(self, worker: int, weights_round: int | None) -> tuple[Span, ...]:
        """Give a worker a lost share, if the evaluation is of the weights after this round."""
        evaluation = self._evaluation
        if evaluation is None or evaluation.weights_round != weights_round:
            return ()
        return evaluation.hand_out(worker)

    def evaluated(self, part: Evaluated) -> None:
        """Add a worker's result."""
        if self._evaluation is not None:
            self._evaluation.take(part)

    # ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def empty(self) -> bool:
        """Whether no record is pending."""
        return not self.awaiting_merge and self._evaluation is None

    def busy(self, version: int) -> set[int]:
        """Workers that have to evaluate, or to merge the results before a version."""
        workers: set[int] = set()
        if self._evaluation is not None:
            workers.update(self._evaluation.pending)
        for committed_round in self.awaiting_merge:
            if committed_round.number < version:
                workers |= committed_round.merging
        return workers

    def forget(self, worker: int) -> None:
        """Stop waiting for a lost worker; its evaluation share goes to another."""
        for committed_round in self.awaiting_merge:
            committed_round.merging.discard(worker)
        if self._evaluation is not None:
            self._evaluation.lose(worker)

    def stop_waiting(self, version: int, now: float) -> None:
        """Write the records of weights before a version, without waiting for merges or evaluations.

        A partial evaluation makes no record.
        """
        for committed_round in self.awaiting_merge:
            if committed_round.number < version:
                committed_round.merging.clear()
        if self._evaluation is not None and self._evaluation.weights_round < version:
            self._evaluation = None
        self.settle(now)

    def settle(self, now: float) -> None:
        """Write complete records; a round's comes after the evaluation of its weights."""
        self.settle_evaluation(now)
        while self.awaiting_merge and not self.awaiting_merge[0].merging:
            if self._evaluation is not None and self._evaluation.weights_round == self.awaiting_merge[0].number:
                break
            self.emit(now)

    def settle_evaluation(self, now: float) -> None:
        """Write the record of a complete evaluation."""
        if self._evaluation is not None and self._evaluation.complete:
            record = self._evaluation.record(self._perplexity, self._metrics)
            if record is not None:
                self.patience.take(record)
                record["elapsed_s"] = self._totals.elapsed_s(now)
                self._out.put(c.LogMetric(record))
            self._evaluation = None

    def emit(self, now: float) -> None:
        """Write the record of the oldest round, if any."""
        if self.awaiting_merge:
            committed_rounds = self.awaiting_merge[-1].number + 1
            oldest_round = self.awaiting_merge.popleft()
            rounds = self._plans.expected_rounds(committed_rounds)
            record = oldest_round.record(rounds, self._totals.elapsed_s(now), self._plans.ledger.epoch)
            self._times.record(oldest_round.number, now)
            self._plans.round_sizes.observe(oldest_round.number, self._times.recorded(oldest_round.number))
            self._out.put(c.LogMetric(record))
            for text in self._signs.fresh(record):
                self._out.problem(text, now)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[R]):
    """The next round waits for weights, workers or the store."""

    number: int
    previous_round: R | None
    """Round before it; None if it is the first of this attempt."""


@dataclass(slots=True)
class Training(Generic[R]):
    """A round takes deltas."""

    round: R
    grace_until: float | None = None
    """Time at which it closes without missing deltas; None: it waits for all."""


@dataclass(frozen=True, slots=True)
class Reducing(Generic[R]):
    """The round's deltas are in; the weights due in the next one aren't there yet."""

    round: R


@dataclass(frozen=True, slots=True)
class Evaluating(Generic[R]):
    """All rounds are committed; the newest weights are evaluated."""

    round: R


State: TypeAlias = Waiting[R] | Training[R] | Reducing[R] | Evaluating[R]


def strike(roster: Roster, out: Outbox, verdict: Verdict, now: float) -> list[Source]:
    """Count strikes for a verdict's rejections; return the workers that are excluded."""
    excluded_workers: list[Source] = []
    for rejection in verdict.rejected:
        worker = rejection.worker
        if rejection.blamed and roster.strike(worker):
            out.event("exclude", now, worker=worker, strikes=roster.most_strikes)
            source = roster.slots[worker].source
            if source is not None:
                excluded_workers.append(source)
    return excluded_workers


class RoundStrategy(Generic[R, C]):
    """Current round, of type `R`, and committed rounds without a record, of type `C`."""

    def __init__(self, job: Job, resume_point: ResumePoint, roster: Roster, plans: WorkerPlans, out: Outbox) -> None:
        self._job = job
        self._roster = roster
        self.plans = plans
        self._out = out
        self.state: State[R] = Waiting(resume_point.next_round, None)
        self.latest_version = WeightsVersion(resume_point.next_round)
        """Version of the newest committed weights."""
        self.commits = resume_point.next_round
        """Number of committed rounds of the run."""
        self.reported_samples = 0
        """Samples reported by the present workers in the current round, if it has a barrier."""
        self._totals = RunTotals(resume_point.state.get("totals", {}))
        self.pending: PendingRounds[C] = PendingRounds(job, resume_point, self._totals, plans, roster.times, out)
        self.sent_bytes: tuple[int, tuple[int, ...]] = 0, ()
        """Bytes of all of θ, and of each fragment."""

    @property
    def current(self) -> R | None:
        """Round that began last; None before the first."""
        return self.state.previous_round if isinstance(self.state, Waiting) else self.state.round

    @property
    def next(self) -> int | None:
        """Round that is to begin; None while one is in progress."""
        return self.state.number if isinstance(self.state, Waiting) else None

    @property
    def open(self) -> bool:
        """Whether workers may join the present round."""
        return isinstance(self.state, Training | Evaluating)

    @property
    def final(self) -> bool:
        """Whether the last evaluation is in progress."""
        return isinstance(self.state, Evaluating)

    @property
    def trained(self) -> bool:
        """Whether all rounds are committed, so that at most the last evaluation is missing."""
        round_number = self.next
        return self.final or (round_number is not None and self.plans.is_over(round_number))

    @property
    def grace_until(self) -> float | None:
        """Time at which the round closes without missing deltas; None: it waits for all."""
        return self.state.grace_until if isinstance(self.state, Training) else None

    def defer(self, seconds: float) -> None:
        """Extend the grace time by a pause of the scheduler's own process."""
        if isinstance(self.state, Training) and self.state.grace_until is not None:
            self.state.grace_until += seconds

    @property
    def samples(self) -> int:
        """Samples of the run's commits, and of the reports about the current round."""
        return self._totals.samples + (self.reported_samples if isinstance(self.state, Training) else 0)

    @property
    def samples_left(self) -> int:
        """Samples up to the end of the run that neither a commit nor a report has."""
        if self.plans.ends_by_samples:
            uncommitted = self.plans.ledger.unused
        else:
            warmup_rounds = max(0, self._job.rounds.warmup_rounds - self.commits)
            later_rounds = self._job.rounds.update_rounds - self.commits - warmup_rounds
            uncommitted = warmup_rounds * self._job.samples(0) + later_rounds * self.plans.round_sizes.samples
        return max(0, uncommitted - (self.samples - self._totals.samples))

    def _enter(self, current_round: R, round_number: int) -> None:
        """Make a round the current one; the round after the last only evaluates."""
        if self.plans.is_over(round_number):
            self.state = Evaluating(current_round)
        else:
            self.state = Training(current_round)

    def correct_plans(self, now: float, urgent: bool = False) -> None:
        """Adapt plans to the progress of other workers; without a barrier there is nothing to adapt."""

    def make_up_corrections(self, now: float) -> None:
        """Correct plans if a deferred correction is due."""

    def _settle(self, now: float) -> None:
        """Write complete records; end the run after the last one, or early."""
        self.pending.settle(now)
        if self.final and self.pending.empty:
            self._out.finish(None)
        self._end_early(now)

    def _end_early(self, now: float) -> bool:
        """End the run, without the round in progress, if its evaluations no longer improve.

        Returns:
            Whether the run has ended.

        """
        reason = self.pending.patience.exhausted
        if reason is not None and not self.final and not self._out.over:
            self.stop(reason, now)
        return self._out.over

    def stop(self, reason: str, now: float) -> None:
        """End the run early, without the round in progress."""
        self._out.event("stop", now, reason=reason)
        self.stop_waiting(now)
        self._out.finish(None)

    def stop_waiting(self, now: float) -> None:
        """Give up merges and evaluations in progress."""
        self.pending.stop_waiting(self.latest_version + 1, now)

    def _take_merge(self, member: WorkerState, event: Merged, now: float) -> None:
        """Record the version that a worker has merged; it is done if that was all of a final plan."""
        if member.merged_version != event.version:
            self._roster.times.merge(member.source.worker, event.version, event.waited_s, now)
        member.merged_at = now
        member.merged_version = event.version
        if member.plan is not None and not member.plan.evaluate:
            member.progress.heard_at = now
            self._done_if_final(member)

    def _record_evaluation(self, member: WorkerState, event: Evaluated, now: float) -> None:
        member.progress.heard_at = now
        self._roster.times.evaluate(member.source.worker, event.seconds)
        self.pending.evaluated(event)
        self._done_if_final(member)
        self._settle(now)

    def _done_if_final(self, member: WorkerState) -> None:
        if member.plan is not None and member.plan.final and member.merged_version == member.plan.round:
            self._roster.done(member.source.worker)

    def _persist(
        self, round_number: int, verdict: Verdict, used_spans: c.Used, deltas: Iterable[Delta], now: float, **more: int
    ) -> dict[str, Any]:
        """Persist a round's weights and the state that a later scheduler needs; return the run's totals."""
        self.commits = round_number + 1
        totals = self._totals.totals(now)
        ledger = self.plans.ledger
        state = {"totals": totals, "workers": self._roster.state(), **self.plans.state(), **more}
        if self.plans.used_up:
            state["last"] = True
        responders = by_responder(chain.from_iterable(delta.responders for delta in deltas))
        positions = ledger.cursors(), ledger.epoch, ledger.ahead()
        self._out.put(c.Persist(round_number, verdict, used_spans, *positions, state, responders))
        return totals
