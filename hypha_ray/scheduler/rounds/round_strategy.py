"""State and steps shared by all strategies: the current round, the records, and the end of workers and of the run.

    Waiting ──begin──► Training ──deltas in──► Reducing ──weights of the next round──► Waiting … ──► Evaluating

Each state holds its evidence. Without a barrier deltas are reduced while others train: `Training` is followed by
`Waiting`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.worker_plans import WorkerPlans
from hypha_ray.scheduler.resume_point import ResumePoint, RunTotals
from hypha_ray.scheduler.rounds.pending import C, PendingRounds
from hypha_ray.types import Delta, Evaluated, Merged, Source, Verdict, WeightsVersion, by_responder

R = TypeVar("R")
"""Type of the strategy's rounds."""


@dataclass(frozen=True, slots=True)
class Waiting(Generic[R]):
    """The next round waits for weights, workers or the store."""

    number: int
    before: R | None
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
    excluded: list[Source] = []
    for rejection in verdict.rejected:
        worker = rejection.worker
        if rejection.blamed and roster.strike(worker):
            out.event("exclude", now, worker=worker, strikes=roster.most_strikes)
            source = roster.slots[worker].source
            if source is not None:
                excluded.append(source)
    return excluded


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
        return self.state.before if isinstance(self.state, Waiting) else self.state.round

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
        number = self.next
        return self.final or (number is not None and self.plans.is_over(number))

    @property
    def unevaluated(self) -> bool:
        """Whether a share of the evaluation waits for a joining worker."""
        return self.pending.share_is_lost

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

    def _enter(self, current: R, number: int) -> None:
        """Make a round the current one; the round after the last only evaluates."""
        if self.plans.is_over(number):
            self.state = Evaluating(current)
        else:
            self.state = Training(current)

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
        self, number: int, verdict: Verdict, used: c.Used, deltas: Iterable[Delta], now: float, **more: int
    ) -> dict[str, Any]:
        """Persist a round's weights and the state that a later scheduler needs; return the run's totals."""
        self.commits = number + 1
        totals = self._totals.totals(now)
        ledger = self.plans.ledger
        state = {"totals": totals, "workers": self._roster.state(), **self.plans.state(), **more}
        if self.plans.used_up:
            state["last"] = True
        responders = by_responder(chain.from_iterable(delta.responders for delta in deltas))
        positions = ledger.cursors(), ledger.epoch, ledger.ahead()
        self._out.put(c.Persist(number, verdict, used, *positions, state, responders))
        return totals
