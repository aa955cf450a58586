"""Rounds without a barrier: each delta is merged as it arrives, and its worker goes on from the new weights.

    idle ──plan──► local round ──delta──► arrived ──reduce──► merged, or rejected ──► idle …
                                             │
                          waits for a reduction in progress, and for the grace time

A round ends after N merged deltas: outer momentum is stepped, and the weights are committed and evaluated. Versions
of the weights count reductions; to a worker, the version is the number of its round. After a crash the run resumes
from the last commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.asynchronous.async_planner import AsyncPlanner
from hypha_ray.scheduler.asynchronous.async_round import (
    ArrivalQueue,
    AsyncRound,
    CommittedAsyncRound,
    LocalRound,
    LocalRounds,
    ReceivedDelta,
)
from hypha_ray.scheduler.failures import diverged
from hypha_ray.scheduler.messages import Outbox, ResumePoint
from hypha_ray.scheduler.roster import Roster
from hypha_ray.scheduler.round_strategy import RoundStrategy, Training, Waiting, strike
from hypha_ray.scheduler.worker_state import WorkerState, known_batch_s, weight
from hypha_ray.telemetry.round_records import CommitMetrics, step_record
from hypha_ray.types import (
    Delta,
    Evaluated,
    Merged,
    Rejection,
    Report,
    RoundEvent,
    Source,
    Span,
    Verdict,
    WeightsVersion,
)


class AsyncRounds(RoundStrategy[AsyncRound, CommittedAsyncRound]):
    """Rounds that end after a number of merged deltas; for the arguments, see `RoundStrategy`."""

    def __init__(self, job: Job, resume_point: ResumePoint, roster: Roster, planner: AsyncPlanner, out: Outbox) -> None:
        super().__init__(job, resume_point, roster, planner.plans, out)
        self._planner = planner
        self.queue = ArrivalQueue(job, planner.size, resume_point)
        self.training = LocalRounds()
        self._unplanned: set[int] = set()
        """Workers that may be idle; all others train, have a delta in the queue, or don't exist."""
        self._handed_over_at: dict[int, float] = {}

    # ── what the core asks ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def busy(self) -> set[int]:
        """Workers that train or evaluate."""
        return set(self.training.rounds) | self.pending.busy(0)

    def accepts(self, member: WorkerState, event: RoundEvent | Merged) -> bool:
        """Whether an event belongs to the worker's current local round."""
        return member.plan is not None and event.round == member.plan.round

    def commit_before(self, version: WeightsVersion) -> int | None:
        """Round whose commit has the weights of a version; None: they were never committed."""
        return self.queue.commits.get(version)

    def begin(self, now: float) -> None:
        """Begin a round; the one after the last only evaluates."""
        assert isinstance(self.state, Waiting)
        if self._end_early(now):  # An earlier attempt recorded the last evaluation, and was killed.
            return
        round_number = self.state.number
        self._totals.begin(now)
        self._enter(AsyncRound(round_number, now, self._planner.size), round_number)
        if self.final:
            self._discard_unmerged(now)
        self._unplanned.update(member.source.worker for member in self._roster.assignable)
        members = self._idle() if self.final else self._employable()
        if not self.pending.evaluating:
            self.pending.start_evaluation(
                round_number - 1, self._planner.eval_shares(round_number, members, self.final)
            )
        if self.final:
            for member in members:
                self._plan_last(member)
        self._advance(now)
        self._settle(now)

    def _plan_last(self, member: WorkerState) -> None:
        commands = self._planner.plan_last(self.queue.version, member, self._share(member))
        self._out.put(*commands)

    def join(self, member: WorkerState, now: float) -> None:
        """Let a worker in; it takes over a lost evaluation share if it gets those weights."""
        self._unplanned.add(member.source.worker)
        if self.final or self._employable():
            self.pending.hand_out(member.source.worker, self.commit_before(self.queue.version))
        if self.final:
            self._plan_last(member)
        self._advance(now)

    def forget(self, member: WorkerState, now: float) -> None:
        """Stop waiting for a lost worker; its delta, if delivered, stays."""
        worker = member.source.worker
        self.training.pop(member)
        self._handed_over_at.pop(worker, None)
        self.pending.forget(worker)
        if not self.queue.holds(worker):
            self.plans.ledger.release(worker)
        self._advance(now)
        self._settle(now)

    def discard_delta(self, source: Source) -> None:
        """Drop an unmerged delta of a worker that began with wrong weights."""
        arrival = self.queue.arrived.get(source.worker)
        if arrival is not None and arrival.delta.source == source:
            self.queue.discard(source.worker)
            self._unplanned.add(source.worker)

    def close(self, now: float) -> None:
        """End the grace time: reduce what has arrived."""
        assert isinstance(self.state, Training)
        self.state.grace_until = None
        if self.queue.arrived and not self.queue.reducing:
            self._reduce(self.state, now)

    # ── events of workers ────────────────────────────────────────────────────────────────────────────────────────────

    def handle(self, member: WorkerState, event: RoundEvent | Merged, now: float) -> None:
        """Handle a worker's event about its local round."""
        assert self.current is not None
        match event:
            case Report():
                self._record_report(member, self.current, event, now)
            case Delta():
                self._record_delta(member, self.current, event, now)
            case Merged():
                self._record_merge(member, event, now)
            case Evaluated():
                self._record_evaluation(member, event, now)

    def _record_report(self, member: WorkerState, current_round: AsyncRound, report: Report, now: float) -> None:
        self.training.report(member, report.samples)
        member.report(report, now)
        current_round.figures.learning_rate = report.learning_rate
        samples = self._trained_samples() - self._totals.samples + current_round.samples
        record = step_record(report, samples, self._job.rounds.samples_between_updates)
        record |= {"round": current_round.number, "elapsed_s": self._totals.elapsed_s(now)}
        self._out.put(c.LogMetric(record))
        local_round = self.training.rounds.get(member.source.worker)
        if self.open and local_round is not None:
            fleet = self._roster.assignable_and(member)
            commands = self._planner.resize(member, fleet, local_round.began_at, now)
            self._out.put(*commands)

    def _record_delta(self, member: WorkerState, current_round: AsyncRound, delta: Delta, now: float) -> None:
        worker = member.source.worker
        local_round = self.training.pop(member)
        if local_round is None:
            self._out.stale(delta, now)
            return
        current_round.bytes_up += delta.payload_bytes
        member.delivered(delta, now - local_round.began_at, local_round.evaluating)
        self._roster.times.deliver(worker, delta, now)
        self.queue.receive(ReceivedDelta(delta, local_round))
        self._handed_over_at[worker] = now
        self._advance(now)

    def _record_merge(self, member: WorkerState, event: Merged, now: float) -> None:
        local_round = self.training.rounds.get(member.source.worker)
        if local_round is not None and self.current is not None and member.merged_version != event.version:
            waited_s = None if local_round.handed_over_at is None else now - local_round.handed_over_at
            began_at = local_round.began_at if member.merged_at is None else member.merged_at
            self.current.began(member.source.worker, waited_s, now - began_at, self.sent_bytes[0])
        self._take_merge(member, event, now)

    # ── from deltas to weights ──────────────────────────────────────────────────────────────────────────────────

    def _advance(self, now: float) -> None:
        """Plan local rounds for idle workers, then reduce all deltas that have arrived, one reduction at a time."""
        if not isinstance(self.state, Training) or self.queue.reducing:
            return
        for rejection in self.queue.drop_stale():
            self._unplanned.add(rejection.worker)
            self._reject(rejection, now)
        members = self._employable()
        for position, member in enumerate(members):
            self.plans.share_among(len(members) - position)
            self._plan_local_round(member, now)
        self.plans.reserve = 0
        if not self.queue.arrived:
            return
        if self.state.grace_until is None:
            self.state.grace_until = now + self._planner.grace_s(self._roster.assignable)
        if not self.training.rounds or now >= self.state.grace_until:
            self._reduce(self.state, now)

    def plan_reasons(self, workers: Iterable[int]) -> dict[str, Any]:
        """Reasons of the newest plans of these workers, as fields of an event."""
        return self._planner.reasons.fields(workers)

    def _plan_local_round(self, member: WorkerState, now: float) -> None:
        assert self.current is not None
        worker = member.source.worker
        share = self._share(member)
        version = self.queue.version
        handed_over_at = self._handed_over_at.pop(worker, None)
        trained_rounds = self._trained_samples() / self._job.rounds.samples_between_updates
        commands = self._planner.plan_local_round(
            version, member, self._roster.assignable_and(member), share, trained_rounds, now
        )
        self.training.rounds[worker] = LocalRound(version, self.queue.merged, now, handed_over_at, bool(share))
        batches = {worker: member.plan and member.plan.batches}
        self._out.event("plan", now, round=self.current.number, batches=batches, predicted_s=None, step=version)
        self._out.put(*commands)

    def _reduce(self, state: Training[AsyncRound], now: float) -> None:
        state.grace_until = None
        self._roster.times.close(WeightsVersion(self.queue.version + 1), (), now)
        plans = self.plans
        arrived_samples = sum(arrival.delta.samples for arrival in self.queue.arrived.values())
        is_last = plans.ends_by_samples and plans.ledger.unused == arrived_samples
        self._out.put(self.queue.reduce(state.round, self.training.oldest_version, is_last))

    def reduced(self, verdict: Verdict, now: float) -> list[Source]:
        """Merge accepted deltas, and commit a complete round; return the workers that are excluded."""
        current_round = self.current
        if current_round is None or not self.queue.is_awaited(verdict):
            return []
        self._unplanned |= self.queue.reducing.keys()
        blamed = [rejection for rejection in verdict.rejected if rejection.blamed]
        self._roster.refused({self.queue.reducing[rejection.worker].delta.source for rejection in blamed})
        for contribution, arrival, staleness in self.queue.take_verdict(verdict):
            worker = contribution.worker
            current_round.accept(contribution, arrival, staleness, weight(self._job.sync, arrival.delta))
            self._planner.settle(worker, arrival.delta.spans)
            self._totals.count(arrival.delta)
            self._roster.times.decide(worker, arrival.delta.round, current_round.number, is_accepted=True)
            self._roster.contributed(worker)
            fields = {"worker": worker, "incarnation": contribution.incarnation, "staleness": staleness}
            self._out.event("arrival", now, round=current_round.number, step=self.queue.version, **fields)
        for rejection in verdict.rejected:
            self._reject(rejection, now)
        if self.queue.hopeless:
            self._out.finish(diverged(current_round.number, blamed[0].reason))
            return []
        excluded_workers = strike(self._roster, self._out, verdict, now)
        if current_round.whole or self.plans.used_up:
            self._commit_round(current_round, verdict.update_norm, now)
        else:
            self._advance(now)
        return excluded_workers

    def _reject(self, rejection: Rejection, now: float) -> None:
        """Record a rejected delta; its samples become available again."""
        assert self.current is not None
        self.plans.ledger.release(rejection.worker)
        self._roster.times.discard(rejection.worker, self.current.number)
        self.current.rejected.append(rejection)
        self._out.event("reject", now, round=self.current.number, worker=rejection.worker, reason=rejection.reason)

    def _commit_round(self, current_round: AsyncRound, update_norm: float, now: float) -> None:
        """Commit a round; the next one begins at once if there are enough workers."""
        self._settle(now)
        self.pending.emit(now)
        members = self._roster.members
        verdict = current_round.verdict(update_norm)
        self.queue.commit(current_round.number)
        totals = self._persist(
            current_round.number, verdict, current_round.spans, current_round.deltas, now, **self.queue.state()
        )
        commit = CommitMetrics(verdict, known_batch_s(members), totals)
        self.pending.awaiting_merge.append(CommittedAsyncRound(current_round, commit, len(members), now))
        self.state = Waiting(current_round.number + 1, current_round)

    def _discard_unmerged(self, now: float) -> None:
        """Discard all unmerged work after the last commit."""
        self._roster.times.close(WeightsVersion(self.queue.version + 1), self.training.rounds, now)
        for worker in (*self.training.rounds, *self.queue.arrived):
            self.plans.ledger.release(worker)
        self.training = LocalRounds()
        self.queue.clear()
        self.pending.cancel_evaluation()

    def _settle(self, now: float) -> None:
        """Write complete records; end the run after the last evaluation, or early."""
        if self.pending.share_is_lost and not self.final and not self.queue.committed:
            self.pending.cancel_evaluation()  # No joining worker will have its weights.
        self.pending.settle_evaluation(now)
        if not self.pending.evaluating and self.next is None:
            self.pending.emit(now)
            if self.final:
                self._out.finish(None)
        self._end_early(now)

    def stop_waiting(self, now: float) -> None:
        """Give up the evaluation in progress."""
        self.pending.cancel_evaluation()
        self.pending.emit(now)

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _idle(self) -> list[WorkerState]:
        """Workers ready for a local round; not those with a queued delta, whose samples are undecided."""
        self._unplanned = {worker for worker in self._unplanned if self._is_idle(worker)}
        members: list[WorkerState] = []
        for worker in sorted(self._unplanned):
            member = self._roster.slots[worker].member
            if member is not None:
                members.append(member)
        return members

    def _employable(self) -> list[WorkerState]:
        """Idle workers for which there is at least a sample each."""
        members = self._idle()
        return members[: self.plans.free_samples] if self.plans.ends_by_samples else members

    def _is_idle(self, worker: int) -> bool:
        slot = self._roster.slots[worker]
        is_occupied = worker in self.training.rounds or self.queue.holds(worker)
        return slot.working and not is_occupied and not slot.excluded

    def _share(self, member: WorkerState) -> tuple[Span, ...]:
        """Evaluation share of a worker, if the newest weights are the ones to evaluate."""
        return self.pending.share(member.source.worker, self.commit_before(self.queue.version))

    def _trained_samples(self) -> int:
        """Samples of the run trained so far: merged, queued and reported."""
        return self._totals.samples + self.queue.samples + self.training.reported
