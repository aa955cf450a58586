"""Rounds that end with a barrier; several exchanges may be in flight, so that later rounds train meanwhile.

    training n ──deltas in──► in flight: n-1, n ──verdict, in order──► merging: n-1 ──merged by all──► recorded
         ▲                          │
         └── round n+1, as soon as the weights due in it are there

Deltas are reduced round by round, so commits are in order. Meanwhile deltas of later rounds are uploaded, and
results of earlier ones downloaded. A joining worker begins with the newest weights and receives all later results.
With one exchange in flight, a round needs the weights of the round before, so it waits for their commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.barrier.round import BarrierRound, CommittedRound, QuorumPlanner, received_bytes
from hypha_ray.scheduler.barrier.round_planner import RoundPlanner
from hypha_ray.scheduler.failures import disowned, failure
from hypha_ray.scheduler.messages import Outbox, ResumePoint
from hypha_ray.scheduler.planner import CorrectionPace
from hypha_ray.scheduler.roster import Roster
from hypha_ray.scheduler.round_strategy import Evaluating, Reducing, RoundStrategy, Training, Waiting, strike
from hypha_ray.scheduler.worker_state import WorkerState, known_batch_s
from hypha_ray.telemetry.round_records import CommitMetrics, step_record
from hypha_ray.types import Delta, Evaluated, Merged, Report, RoundEvent, Source, Span, Verdict, WeightsVersion


class BarrierRounds(RoundStrategy[BarrierRound, CommittedRound]):
    """Rounds that end with the last delta, or by quorum and grace time; for the arguments, see `RoundStrategy`."""

    def __init__(self, job: Job, resume_point: ResumePoint, roster: Roster, planner: RoundPlanner, out: Outbox) -> None:
        super().__init__(job, resume_point, roster, planner.plans, out)
        self._planner = planner
        self._replay = job.run.mode == "replay"
        self._overlapped = job.sync.in_flight > 1
        """Whether a round may begin before the commit of the round before it."""
        self._correction_pace = CorrectionPace(job.num_workers)
        self._quorums = QuorumPlanner(job.sync)
        self._inner_states = set(resume_point.inner)
        """Workers whose inner state is saved for a successor."""
        self.in_flight: deque[BarrierRound] = deque()
        """Rounds with all deltas in, oldest first; the first is being reduced."""

    @property
    def busy(self) -> set[int]:
        """Workers that have to merge, evaluate, train or deliver."""
        match self.state:
            case Waiting():
                return set()
            case Training(round=current):
                undelivered = current.awaiting - current.deltas.keys()
                return undelivered | self.pending.busy(current.weights_version)
            case Reducing(round=current) | Evaluating(round=current):
                return self.pending.busy(current.weights_version)

    @property
    def _open_round(self) -> BarrierRound | None:
        """Round that takes deltas; None if there is none."""
        match self.state:
            case Training(round=current) | Evaluating(round=current):
                return current
            case _:
                return None

    def accepts(self, member: WorkerState, event: RoundEvent | Merged) -> bool:
        """Whether an event belongs to the current round, or is the merge of newer weights."""
        if isinstance(event, Merged) and self._overlapped:
            newer = member.merged_version is None or member.merged_version < event.version
            return newer and event.version <= self.latest_version
        current_round = self.current
        return current_round is not None and event.round == current_round.number

    def commit_before(self, version: WeightsVersion) -> int | None:
        """Round whose commit has the weights of a version; None: they were never committed."""
        return version - 1

    def begin(self, now: float) -> None:
        """Plan the next round, and send every worker its plan."""
        assert isinstance(self.state, Waiting)
        if self._end_early(now):  # An earlier attempt recorded the last evaluation, and was killed.
            return
        round_number = self.state.number
        previous_round = self.state.previous_round
        self._totals.begin(now)
        members = self._roster.assignable
        for member in members:
            self._inherit(member)
        if self._planner.grow(round_number, members):
            round_sizes = self.plans.round_sizes
            share = round_sizes.exchange_share
            self._out.event("round_growth", now, round=round_number, samples=round_sizes.samples, exchange_share=share)
        started_at = previous_round.ready_at if previous_round is not None and previous_round.overlapped else now
        current_round, commands = self._planner.plan_round(round_number, members, self.latest_version, started_at)
        self.reported_samples = sum(member.progress.samples for member in self._roster.members)
        self._enter(current_round, round_number)
        self.pending.start_evaluation(current_round.weights_version - 1, current_round.eval_shares)
        if previous_round is not None:
            self._quorums.observe(previous_round, now)
        current_round.quorum = self._quorums.choose(len(current_round.awaiting))
        batches = {member.source.worker: member.plan.batches for member in members if member.plan is not None}
        quorum_fields: dict[str, Any] = {}
        if self._quorums.adapts:
            quorum_fields = {"quorum": current_round.quorum.deltas, "grace_s": current_round.quorum.grace_s}
        self._out.event(
            "plan", now, round=round_number, batches=batches, predicted_s=current_round.predicted_s, **quorum_fields
        )
        self._out.put(*commands)

    def plan_reasons(self, workers: Iterable[int]) -> dict[str, Any]:
        """Reasons of the plans with which the current round has begun, as fields of its event."""
        return self._planner.reasons().fields(workers)

    # ── workers come and go ───────────────────────────────────────────────────────────────────────────────────────

    def join(self, member: WorkerState, now: float) -> None:
        """Let a worker into the current round, with fewer batches or in its predecessor's place."""
        if not isinstance(self.state, Training | Evaluating):
            return
        self._inherit(member)
        share = self.pending.hand_out(member.source.worker, self.latest_version - 1)
        commands = self._planner.plan_joiner(self.state.round, member, share, self.latest_version)
        self._out.put(*commands)
        self.correct_plans(now)

    def _inherit(self, member: WorkerState) -> None:
        """Have a worker that hasn't trained yet take over its predecessor's inner state, if one is saved."""
        member.needs_inner_state = member.untrained and member.source.worker in self._inner_states

    def forget(self, member: WorkerState, now: float) -> None:
        """Stop waiting for a lost worker. Its delivered deltas stay; others, or its successor, do the rest."""
        worker = member.source.worker
        current_round = self._open_round
        self.reported_samples -= member.progress.samples
        self.pending.forget(worker)
        delivered = self._delivered_by(worker)
        if current_round is not None and worker in current_round.deltas:
            current_round = None  # Nothing is missing from it.
        if current_round is not None and self._replay and member.plan is not None:
            current_round.replay_plans[worker] = member.plan
        elif current_round is not None or self._overlapped or not delivered:
            self.plans.ledger.release(worker, delivered)  # Otherwise the commit takes the rest back.
        if current_round is not None and worker not in current_round.replay_plans:
            current_round.awaiting.discard(worker)
            current_round.lost_at.append(now)
            self.correct_plans(now, urgent=True)
            self._close_if_complete(now)
        self._settle(now)

    def discard_delta(self, source: Source) -> None:
        """Drop deltas of a worker that began with wrong weights, unless they are being reduced."""
        state = self.state
        if isinstance(state, Training) and state.round.discard_delta(source):
            quorum = state.round.quorum.deltas or 1
            if len(state.round.deltas) < quorum:
                state.grace_until = None
        for waiting_round in list(self.in_flight)[1:]:
            if waiting_round.discard_delta(source) and not waiting_round.deltas:
                self._out.finish(disowned(waiting_round.number))

    def handle(self, member: WorkerState, event: RoundEvent | Merged, now: float) -> None:
        """Handle a worker's event about the current round."""
        assert self.current is not None
        match event:
            case Report():
                self.reported_samples += event.samples
                member.report(event, now)
                self.current.figures.learning_rate = event.learning_rate
                record = step_record(event, self.reported_samples, self.current.target_samples)
                record["elapsed_s"] = self._totals.elapsed_s(now)
                self._out.put(c.LogMetric(record))
                self.correct_plans(now)
            case Delta():
                self._record_delta(member, event, now)
            case Merged():
                self._record_merge(member, event, now)
            case Evaluated():
                self._record_evaluation(member, event, now)

    def correct_plans(self, now: float, urgent: bool = False) -> None:
        """Adapt the plans of workers that haven't delivered to the progress of the fleet, now or a little later."""
        if not isinstance(self.state, Training) or not self._correction_pace.allows(now, urgent):
            return
        saved_s, commands = self._planner.replan(self.state.round, self._roster.assignable, now)
        if commands:
            self._out.event("correction", now, round=self.state.round.number, saved_s=saved_s)
        self._out.put(*commands)

    def make_up_corrections(self, now: float) -> None:
        """Correct plans if a deferred correction is due."""
        if self._correction_pace.overdue:
            self.correct_plans(now)

    def _record_delta(self, member: WorkerState, delta: Delta, now: float) -> None:
        worker = member.source.worker
        state = self.state
        if not isinstance(state, Training) or worker in state.round.deltas or worker not in state.round.awaiting:
            self._out.stale(delta, now)
            return
        current_round = state.round
        current_round.deltas[worker] = delta
        current_round.delivered_at[worker] = now
        member.delivered(delta, now - current_round.started_at, current_round.evaluating)
        self._roster.times.deliver(worker, delta, now)
        if len(current_round.deltas) == current_round.quorum.deltas and not self._replay:
            state.grace_until = now + current_round.quorum.grace_s
        self.correct_plans(now)
        self._close_if_complete(now)

    def _close_if_complete(self, now: float) -> None:
        """Close the round once all deltas are in, unless a deferred correction asks for more samples."""
        current_round = self._open_round
        if current_round is not None and current_round.complete and self._correction_pace.overdue:
            self._correction_pace.hurry()
            self.correct_plans(now)
        if current_round is not None and current_round.complete:
            self.close(now)

    def close(self, now: float) -> None:
        """Queue the deltas for reduction, and send the slices that the next round probably needs."""
        assert isinstance(self.state, Training)
        current_round = self.state.round
        late_workers = current_round.awaiting - current_round.deltas.keys()
        current_round.closed_at = now
        if self._quorums.adapts:
            late_members = [member for member in self._roster.members if member.source.worker in late_workers]
            current_round.late = self._planner.expected_deltas(current_round, late_members, now)
        self._roster.times.close(WeightsVersion(current_round.number + 1), late_workers, now)
        self.state = Reducing(current_round)
        if self._overlapped:
            self._roster.rest_idle()
        self.in_flight.append(current_round)
        if len(self.in_flight) == 1:
            self._out.put(current_round.reduction(self._job.sync))
        next_samples = self._planner.usual_samples(current_round.number + 1)
        feeds = self.plans.feed_ahead(next_samples, self._roster.assignable)
        self._out.put(*feeds)
        self._advance()

    def _advance(self) -> None:
        """Let the next round begin if the weights due in it are there."""
        if isinstance(self.state, Reducing):
            round_number = self.state.round.number + 1
            if self._planner.due(round_number) <= self.latest_version:
                self.state = Waiting(round_number, self.state.round)

    # ── from the deltas to the weights ────────────────────────────────────────────────────────────────────────────

    def reduced(self, verdict: Verdict, now: float) -> list[Source]:
        """Commit the oldest round in flight; return the workers that are excluded for their deltas."""
        if not self.in_flight or verdict.round != self.in_flight[0].number:
            return []
        reduced_round = self.in_flight.popleft()
        self.pending.stop_waiting(reduced_round.weights_version, now)
        excluded_workers = self._decide(reduced_round, verdict, now)
        if self._out.over:
            return []
        if self._overlapped:
            self._send_result()
        else:
            self._roster.rest_idle()
        if self.in_flight:
            oldest = self.in_flight[0]
            self._out.put(oldest.reduction(self._job.sync))
        self._advance()
        return excluded_workers

    def _send_result(self) -> None:
        """Send the newest weights to workers that train on; the others get them with the next plan."""
        for member in self._roster.assignable:
            if member.plan is not None:
                commands = self.plans.send_weights(member, self.latest_version)
                self._out.put(*commands)

    def _decide(self, reduced_round: BarrierRound, verdict: Verdict, now: float) -> list[Source]:
        """Commit a round, or end the run if that is impossible; return the workers that are excluded."""
        verdict = reduced_round.judged(verdict)
        for rejection in verdict.rejected:
            self._out.event("reject", now, round=reduced_round.number, worker=rejection.worker, reason=rejection.reason)
        if (error := failure(reduced_round.number, verdict, self._replay)) is not None:
            self._out.finish(error)
            return []
        excluded_workers = strike(self._roster, self._out, verdict, now)
        accepted_workers = {contribution.worker for contribution in verdict.accepted}
        self._roster.times.decide_all(reduced_round.number, accepted_workers)
        totals = self._commit(reduced_round, verdict, now)
        self._owe_samples(reduced_round, verdict, now)
        members = self._roster.members
        self._inner_states -= self._roster.refused(reduced_round.refused(verdict))
        if self._job.sync.overlaps:
            not_accepted = reduced_round.awaiting - accepted_workers
            for member in members:
                if member.source.worker in not_accepted:
                    member.merged_version = None  # The worker's own weights contain samples that are given out again.
        commit = CommitMetrics(verdict, known_batch_s(members), totals)
        merging = {member.source.worker for member in self._roster.assignable}
        committed_round = CommittedRound(reduced_round, commit, merging, now)
        self.pending.awaiting_merge.append(committed_round)
        self.latest_version = WeightsVersion(reduced_round.number + 1)
        return excluded_workers

    def _owe_samples(self, reduced_round: BarrierRound, verdict: Verdict, now: float) -> None:
        """Have later rounds make up for samples that a round lacks: workers have left, or a delta was rejected.

        A quorum is asked for rounds that lack some, and a round of synchronous training is one step.
        """
        lacking_samples = reduced_round.target_samples - sum(contribution.samples for contribution in verdict.accepted)
        if (
            lacking_samples <= 0
            or self._job.sync.quorum is not None
            or self._job.sync.traits.sends_gradients
            or self._replay
        ):
            return
        self._planner.owed += lacking_samples
        if self.plans.ends_by_samples:
            consequence = "later ones make them up"
        elif reduced_round.number + 1 == self._job.rounds.update_rounds:
            consequence = "it was the last one, so the run has fewer than asked for"
        else:
            consequence = "the next ones make them up"
        target = reduced_round.target_samples
        text = f"round {reduced_round.number + 1} has {target - lacking_samples} of its {target} samples: {consequence}"
        self._out.problem(text, now)

    def _spans_of_later_rounds(self) -> dict[int, tuple[Span, ...]]:
        """Samples of later rounds, by worker: delivered, planned or trained ahead."""
        current_round = self._open_round
        later_spans = {worker: self._delivered_by(worker) for worker in self._roster.slots}
        for member in self._roster.members:
            worker = member.source.worker
            if current_round is not None and worker in current_round.awaiting and worker not in current_round.deltas:
                later_spans[worker] += member.assigned
            later_spans[worker] += member.overlap_spans
        return {worker: spans for worker, spans in later_spans.items() if spans}

    def _delivered_by(self, worker: int) -> tuple[Span, ...]:
        """Samples of a worker's delivered deltas that aren't committed."""
        rounds = list(self.in_flight)
        if self._open_round is not None:
            rounds.append(self._open_round)
        spans: list[Span] = []
        for delivered_round in rounds:
            if worker in delivered_round.deltas:
                spans += delivered_round.deltas[worker].spans
        return tuple(spans)

    def _commit(self, current_round: BarrierRound, verdict: Verdict, now: float) -> dict[str, Any]:
        """Mark the samples of accepted deltas as used, and persist the round; return the run's totals."""
        deltas = {contribution.worker: current_round.deltas[contribution.worker] for contribution in verdict.accepted}
        used_spans = {worker: delta.spans for worker, delta in sorted(deltas.items())}
        self.plans.commit(used_spans, self._spans_of_later_rounds())
        for worker, delta in deltas.items():
            self._roster.contributed(worker)
            self._totals.count(delta)
            if delta.inner_state:
                self._inner_states.add(worker)
        return self._persist(current_round.number, verdict, tuple(used_spans.items()), deltas.values(), now)

    def _record_merge(self, member: WorkerState, event: Merged, now: float) -> None:
        for committed_round in self.pending.awaiting_merge:
            if committed_round.number < event.version:
                size_bytes = received_bytes(self._job, self.sent_bytes, committed_round, member, event.version)
                committed_round.merged(member.source.worker, member.merged_at, now, size_bytes, event.waited_s)
        self._take_merge(member, event, now)
        self._settle(now)
