"""The course of a run: one outer round after the other, from plans to deltas to a commit."""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.fragments import exchanged
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.fleet.worker_state import Member, known_batch_s
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.round_planner import Assigner
from hypha_ray.scheduler.resume_point import Past, Tally
from hypha_ray.scheduler.rounds.pending import Records
from hypha_ray.scheduler.rounds.round import Evaluation, Round, failure, step_record, weight
from hypha_ray.types import Delta, Evaluated, Event, Merged, Report, Source, Span, Verdict


class Course:
    """Where the run is.

    Args:
        job: the job file.
        past: what the run goes on from.
        roster: who is there.
        assigner: who does what.
        out: takes commands.

    """

    def __init__(self, job: Job, past: Past, roster: Roster, assigner: Assigner, out: Outbox) -> None:
        self._job, self._roster, self._assigner, self._out = job, roster, assigner, out
        self._replay = job.run.mode == "replay"
        self.next: int | None = past.next_round  # The round that is to begin; None while one goes on.
        self.newest = past.next_round
        """Number of the newest weights, those after the last commit; round n begins number n."""
        self.current: Round | None = None
        self._tally = Tally(past.state.get("totals", {}))
        self._records = Records(job, self._tally, assigner.ledger, out)
        self._inner = set(past.inner)
        """Workers whose successors have an inner state to take over."""
        self.sent_bytes: tuple[int, tuple[int, ...]] = 0, ()
        """Of all of θ, and of each fragment."""
        self.grace_until: float | None = None
        """When the round ends without those who haven't handed over; None: not yet, or no more."""

    @property
    def open(self) -> bool:
        """Whether a round takes deltas."""
        return self.current is not None and not self.current.closed

    @property
    def final(self) -> bool:
        """Whether the round goes on that only evaluates."""
        return self.current is not None and self.current.final

    @property
    def trained(self) -> bool:
        """Whether all rounds are committed, and nothing but the last evaluation may be missing."""
        return self.final or self.next == self._job.rounds.update_rounds

    @property
    def unevaluated(self) -> bool:
        """Whether a part of the evaluation waits for a worker that has yet to come."""
        return self._records.evaluation is not None and bool(self._records.evaluation.lost)

    @property
    def busy(self) -> set[int]:
        """Workers that have something to do: to merge what is due, to evaluate, or to train and hand over."""
        if self.current is None or self.next is not None:
            return set()
        late = set() if self.current.closed else self.current.expected - set(self.current.deltas)
        return late | self._records.busy(self.current.weights)

    def hears(self, member: Member, event: Event) -> bool:
        """Whether a worker speaks of the round that it and everybody else is in."""
        return self.current is not None and event.round == self.current.number

    def commit_before(self, round: int) -> int | None:
        """The commit whose weights a round begins with; None: they were never committed."""
        return round - 1

    def begin(self, now: float) -> None:
        """Plan the next round, and tell every worker."""
        assert self.next is not None
        number, self.next = self.next, None
        self._tally.begin(now)
        members, before = self._roster.free, self.current
        for member in members:
            self._inherit(member)
        self.current, commands = self._assigner.open(number, members, self.newest, now)
        if before is not None and before.overlapped:
            self.current.started_at = before.ready_at
        self.current.overlapped = any(member.ahead for member in members)
        if self.current.evaluating:
            self._records.evaluation = Evaluation(self.current.weights - 1, dict(self.current.shares))
        batches = {member.source.worker: member.plan.batches for member in members if member.plan is not None}
        self._out.note("plan", now, round=number, batches=batches, predicted_s=self.current.predicted_s)
        self._out.put(*commands)

    # ── workers come and go ───────────────────────────────────────────────────────────────────────────────────────

    def join(self, member: Member, now: float) -> None:
        """Let a worker into the round that goes on, with fewer batches or in its predecessor's place."""
        if self.current is None or self.current.closed:
            return
        self._inherit(member)
        share: tuple[Span, ...] = ()
        if (evaluation := self._records.evaluation) is not None and evaluation.number == self.newest - 1:
            share = evaluation.hand_out(member.source.worker)
        self._out.put(*self._assigner.join(self.current, member, share, self.newest))
        self.correct(now)

    def _inherit(self, member: Member) -> None:
        """A worker that hasn't trained yet takes over what its predecessor left."""
        member.restores = member.fresh and member.source.worker in self._inner

    def forget(self, member: Member, now: float) -> None:
        """Wait no longer for a lost worker, and let the others, or its successor, take its share over."""
        worker, current = member.source.worker, self.current
        self._records.forget(worker)
        if current is not None and not current.closed and worker not in current.deltas:
            if self._replay and member.plan is not None:
                current.orphans[worker] = member.plan
            else:
                self._assigner.ledger.release(worker)
                current.expected.discard(worker)
                self.correct(now)
                self._close_if_complete()
        elif current is not None and current.verdict is not None:
            self._assigner.ledger.release(worker)  # It has begun the next round, which isn't planned yet.
        self._settle(now)

    def disown(self, source: Source) -> None:
        """Leave out what a worker has handed over in this round: it began with wrong weights."""
        current = self.current
        if current is None or current.closed or not current.disown(source):
            return
        self.grace_until = None if len(current.deltas) < (self._job.sync.quorum or 1) else self.grace_until

    def defer(self, seconds: float) -> None:
        """The scheduler itself was stopped for a while: the grace time is so much longer."""
        self.grace_until = None if self.grace_until is None else self.grace_until + seconds

    def worked(self, member: Member, event: Event, now: float) -> None:
        """Take in what a worker says of the round that it and everybody else is in."""
        assert self.current is not None
        match event:
            case Report():
                member.report(event, now)
                self.current.learning_rate = event.learning_rate
                samples = sum(one.progress.samples for one in self._roster.members)
                self._out.put(c.Record(step_record(event, samples, self._job.samples(event.round))))
                self.correct(now)
            case Delta():
                self._delivered(member, self.current, event, now)
            case Merged():
                self._merged(member, event, now)
            case Evaluated():
                member.progress.heard_at = now
                if self._records.evaluation is not None:
                    self._records.evaluation.take(event)
                self._done_if_final(member)
                self._settle(now)

    def correct(self, now: float) -> None:
        """Adapt the plans of those who haven't handed over to what has become of the others."""
        current = self.current
        if current is None or current.closed:
            return
        late = [member for member in self._roster.free if member.source.worker not in current.deltas]
        saved_s, commands = self._assigner.correct(current, late, now)
        if commands:
            self._out.note("correction", now, round=current.number, saved_s=saved_s)
        self._out.put(*commands)

    def _delivered(self, member: Member, current: Round, delta: Delta, now: float) -> None:
        worker = member.source.worker
        if current.closed or worker in current.deltas or worker not in current.expected:
            self._out.note("stale", now, worker=worker, incarnation=member.source.incarnation, round=delta.round)
            return
        current.deltas[worker], current.delivered_at[worker] = delta, now
        member.delivered(delta, now - current.started_at, current.evaluating)
        if len(current.deltas) == self._job.sync.quorum and not self._replay:
            self.grace_until = now + self._job.sync.grace_s
        self.correct(now)
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        if self.current is not None and self.current.deltas and set(self.current.deltas) == self.current.expected:
            self.close()

    def close(self) -> None:
        """Reduce what is there; meanwhile send ahead what the next round will probably need."""
        assert self.current is not None
        self.current.closed, self.grace_until = True, None
        self._send_to_server(self.current)
        self._out.put(*self._assigner.feed_ahead(self.current.number + 1, self._roster.free))

    def _send_to_server(self, done: Round) -> None:
        deltas = [delta for _, delta in sorted(done.deltas.items())]
        weights = tuple(weight(self._job.sync, delta) for delta in deltas)
        self._out.put(c.Reduce(done.number, tuple(delta.source for delta in deltas), weights))

    # ── from the deltas to the next round ─────────────────────────────────────────────────────────────────────────

    def reduced(self, verdict: Verdict, now: float) -> list[Source]:
        """Commit a round; returns the workers that are excluded for what they delivered."""
        current = self.current
        if current is None or not current.closed or verdict.round != current.number or current.verdict is not None:
            return []
        self._records.give_up(current.weights, now)
        excluded = self._decide(current, verdict, now)
        if self._out.over:
            return []
        for member in self._roster.members:
            member.rest_if_idle()
        self.next = current.number + 1
        return excluded

    def _decide(self, done: Round, verdict: Verdict, now: float) -> list[Source]:
        """Commit a round, if it can be; returns the workers that are excluded for their deltas."""
        verdict = done.judged(verdict, now)
        for rejection in verdict.rejected:
            self._out.note("reject", now, round=done.number, worker=rejection.worker, reason=rejection.reason)
        if (error := failure(done.number, verdict, self._replay)) is not None:
            self._out.finish(error)
            return []
        excluded = self._strike(verdict, now)
        self._commit(done, verdict, now)
        members, accepted = self._roster.members, {one.worker for one in verdict.accepted}
        self._inner -= self._roster.refused(done.refused)
        for member in members if self._job.sync.overlaps else ():
            if member.source.worker in done.expected - accepted:
                member.has = None  # Its own weights have seen samples that are given out again: it drops them.
        done.merging = {member.source.worker for member in self._roster.free}
        done.batch_s, self.newest = known_batch_s(members), done.number + 1
        self._records.landing.append(done)
        return excluded

    def _ahead(self) -> dict[int, tuple[Span, ...]]:
        """What workers have begun the next round with, when one is committed."""
        return {member.source.worker: member.ahead for member in self._roster.free if member.ahead}

    def _commit(self, current: Round, verdict: Verdict, now: float) -> None:
        """Count the samples of accepted deltas as used, and have it all written down."""
        deltas = {one.worker: current.deltas[one.worker] for one in verdict.accepted}
        used = {worker: delta.spans for worker, delta in sorted(deltas.items())}
        self._assigner.commit(used, self._ahead())
        for worker, delta in deltas.items():
            self._roster.contributed(worker)
            self._tally.count(delta)
        self._inner |= {worker for worker, delta in deltas.items() if delta.inner_state}
        self._persist(current, verdict, tuple(used.items()), now)

    def _persist(self, current: Round, verdict: Verdict, used: c.Used, now: float, **more: int) -> None:
        """Have a round's weights written down, and all that a later scheduler needs beside them."""
        current.totals, ledger = self._tally.totals(now), self._assigner.ledger
        state = {"totals": current.totals, "workers": self._roster.state(), **more}
        figures = (ledger.cursors(), ledger.epoch, ledger.ahead(), state)
        self._out.put(c.Persist(current.number, verdict, used, *figures))

    def _strike(self, verdict: Verdict, now: float) -> list[Source]:
        """Count what was rejected for what it is; returns the workers that are excluded for it."""
        excluded = [one.worker for one in verdict.rejected if one.blamed and self._roster.strike(one.worker)]
        for worker in excluded:
            self._out.note("exclude", now, worker=worker, strikes=self._job.sync.strikes)
        return [source for worker in excluded if (source := self._roster.slots[worker].source) is not None]

    def _merged(self, member: Member, event: Merged, now: float) -> None:
        for one in self._records.landing:
            if one.number < event.round:
                one.merged(member.source.worker, member.merged_at, now, self._size(one, member, event), event.waited_s)
        member.merged_at, member.has = now, event.round
        if member.plan is not None and not member.plan.evaluate:
            member.progress.heard_at = now
            self._done_if_final(member)
        self._settle(now)

    def _size(self, done: Round, member: Member, event: Merged) -> int:
        """Bytes of what a worker has merged as a round's result."""
        every, parts = self.sent_bytes
        if member.whole == event.round:
            return every if done.number == event.round - 1 else 0
        return done.coded_bytes or sum(parts[n] for n in exchanged(self._job, done.number))

    def _done_if_final(self, member: Member) -> None:
        if member.plan is not None and member.plan.final and member.has == member.plan.round:
            self._roster.done(member.source.worker)

    def _settle(self, now: float) -> None:
        """Write the records that are complete; end the run after those of the last round."""
        self._records.settle(now)
        if self.final and self._records.written:
            self._out.finish(None)

    def close_books(self, now: float) -> None:
        """Wait no longer for anybody to merge or to evaluate."""
        self._records.give_up(self.newest + 1, now)
        self._settle(now)
