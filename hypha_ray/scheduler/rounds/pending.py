"""Committed rounds and the evaluation in progress, until their records are complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from hypha_ray.config import Job
from hypha_ray.figures import METRIC, Figure, figures_of, metric_figure
from hypha_ray.model.tasks import find_task
from hypha_ray.plugins import create
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.fleet.time_book import TimeBook
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.worker_plans import WorkerPlans
from hypha_ray.scheduler.resume_point import ResumePoint, RunTotals
from hypha_ray.scheduler.rounds.metrics import EvaluationPatience, LearningReports
from hypha_ray.types import Evaluated, Span, Sums, added


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
        parts = [part for _, part in sorted(self.parts.items()) if _has_weight(part)]
        if not parts or not self.complete:
            return None
        common = set(parts[0].sums)
        for part in parts[1:]:
            common &= part.sums.keys()
        sums: Sums = {}
        count = 0.0
        for name, (total, weight) in added(part.sums for part in parts).items():
            is_metric = name.startswith(METRIC)
            if name in common or is_metric:
                sums[name] = total, weight
            if name in common and not is_metric:
                count = max(count, weight)
        figures = figures_of(sums, perplexity, metrics)
        seconds = max(part.seconds for part in parts)
        return {"kind": "eval", "round": self.weights_round, **figures, "count": int(count), "seconds": seconds}


def _has_weight(part: Evaluated) -> bool:
    """Whether a part has a figure with a weight."""
    return any(weight for _, weight in part.sums.values())


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
        for committed in self.awaiting_merge:
            if committed.number < version:
                workers |= committed.merging
        return workers

    def forget(self, worker: int) -> None:
        """Stop waiting for a lost worker; its evaluation share goes to another."""
        for committed in self.awaiting_merge:
            committed.merging.discard(worker)
        if self._evaluation is not None:
            self._evaluation.lose(worker)

    def stop_waiting(self, version: int, now: float) -> None:
        """Write the records of weights before a version, without waiting for merges or evaluations.

        A partial evaluation makes no record.
        """
        for committed in self.awaiting_merge:
            if committed.number < version:
                committed.merging.clear()
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
            committed = self.awaiting_merge[-1].number + 1
            done = self.awaiting_merge.popleft()
            rounds = self._plans.expected_rounds(committed)
            record = done.record(rounds, self._totals.elapsed_s(now), self._plans.ledger.epoch)
            self._times.record(done.number, now)
            self._plans.round_sizes.observe(done.number, self._times.recorded(done.number))
            self._out.put(c.LogMetric(record))
            for text in self._signs.fresh(record):
                self._out.problem(text, now)
