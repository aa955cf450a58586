"""The course of a run without a barrier: each delta is merged as it comes, and its worker goes on from the new weights.

    idle ──turn──► training ──delta──► arrived ──reduce──► merged, or rejected ──► idle …
                                          │
                        waits for a reduction that goes on, and for the grace time

A round is a period of N merged deltas: then outer momentum is stepped, the weights are committed, and evaluated by
those whose deltas came last. Between two commits weights are known by the number of the reduction that made them, the
*step*; to a worker that is the number of its round. After a crash all goes on from the last commit.
"""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.fleet.worker_state import Member, known_batch_s
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.async_planner import Turns
from hypha_ray.scheduler.resume_point import Past
from hypha_ray.scheduler.rounds.async_round import Arrival, Period, Turn
from hypha_ray.scheduler.rounds.round import Evaluation, diverged, step_record
from hypha_ray.scheduler.strategies.arrival_queue import Inflow
from hypha_ray.scheduler.strategies.barrier import Course
from hypha_ray.types import Delta, Evaluated, Event, Merged, Rejection, Report, Source, Span, Verdict


class Arrivals(Course):
    """Where the run is; for the arguments, see `Course`."""

    current: Period | None

    def __init__(self, job: Job, past: Past, roster: Roster, turns: Turns, out: Outbox) -> None:
        super().__init__(job, past, roster, turns, out)
        self._turns = turns
        self._inflow = Inflow(job, turns.size, past)
        self._training: dict[int, Turn] = {}
        self._handed_over_at: dict[int, float] = {}

    # ── what the core asks ────────────────────────────────────────────────────────────────────────────────────────

    @property
    def open(self) -> bool:
        """Whether workers may join."""
        return self.current is not None and self.next is None

    @property
    def busy(self) -> set[int]:
        """Workers that have something to do."""
        return set(self._training) | self._records.busy(0)

    def hears(self, member: Member, event: Event) -> bool:
        """Whether a worker speaks of the turn that it has."""
        return member.plan is not None and event.round == member.plan.round

    def commit_before(self, round: int) -> int | None:
        """The commit whose weights a turn begins with; None: they were never committed."""
        return self._inflow.commits.get(round)

    def begin(self, now: float) -> None:
        """Begin a period; in the one after the last, nothing but evaluation is done."""
        assert self.next is not None
        number, self.next = self.next, None
        self._tally.begin(now)
        final = number == self._job.rounds.update_rounds
        self.current = Period(number, now, None, final, size=self._turns.size)
        if final:
            self._call_off()
        members = self._idle()
        if self._records.evaluation is None:
            shares = self._turns.shares(number, members)
            self._records.evaluation = Evaluation(number - 1, dict(shares)) if shares else None
        if final:
            for member in members:
                self._out.put(*self._turns.last(self._inflow.step, member, self._share(member)))
        self._go_on(now)
        self._settle(now)

    def join(self, member: Member, now: float) -> None:
        """Let a worker in: it takes a lost share of the evaluation over where it gets the weights for that."""
        if self._records.evaluation is not None and self._inflow.committed:
            self._records.evaluation.hand_out(member.source.worker)
        if self.final:
            self._out.put(*self._turns.last(self._inflow.step, member, self._share(member)))
        self._go_on(now)

    def forget(self, member: Member, now: float) -> None:
        """Wait no longer for a lost worker. What it has handed over stays."""
        worker = member.source.worker
        self._training.pop(worker, None)
        self._handed_over_at.pop(worker, None)
        self._records.forget(worker)
        if worker not in self._inflow.workers:
            self._turns.ledger.release(worker)
        self._go_on(now)
        self._settle(now)

    def disown(self, source: Source) -> None:
        """Leave out what a worker has handed over and nobody has merged: it began with wrong weights."""
        arrival = self._inflow.arrived.get(source.worker)
        if arrival is not None and arrival.delta.source == source:
            del self._inflow.arrived[source.worker]

    def correct(self, now: float) -> None:
        """Nothing depends on what becomes of the others."""

    def close(self) -> None:
        """The grace time is over."""
        self.grace_until = None
        if self.open and self._inflow.arrived and not self._inflow.reducing:
            self._reduce()

    # ── workers' words ────────────────────────────────────────────────────────────────────────────────────────────

    def worked(self, member: Member, event: Event, now: float) -> None:
        """Take in what a worker says of its turn."""
        assert self.current is not None
        match event:
            case Report():
                self._reported(member, self.current, event, now)
            case Delta():
                self._arrived(member, self.current, event, now)
            case Merged():
                self._merged(member, event, now)
            case Evaluated():
                super().worked(member, event, now)

    def _reported(self, member: Member, current: Period, report: Report, now: float) -> None:
        member.report(report, now)
        current.learning_rate = report.learning_rate
        samples = self._trained() - self._tally.samples + current.samples
        record = step_record(report, samples, self._job.rounds.samples_between_updates)
        self._out.put(c.Record({**record, "round": current.number}))
        if self.open and (turn := self._training.get(member.source.worker)) is not None:
            self._out.put(*self._turns.resize(member, self._fleet(member), turn.began_at, now))

    def _arrived(self, member: Member, current: Period, delta: Delta, now: float) -> None:
        worker = member.source.worker
        turn = self._training.pop(worker, None)
        if turn is None:
            self._out.note("stale", now, worker=worker, incarnation=member.source.incarnation, round=delta.round)
            return
        current.bytes_up += delta.payload_bytes
        member.delivered(delta, now - turn.began_at, turn.evaluating)
        self._inflow.arrived[worker] = Arrival(delta, turn)
        self._handed_over_at[worker] = now
        self._go_on(now)

    def _merged(self, member: Member, event: Merged, now: float) -> None:
        turn = self._training.get(member.source.worker)
        if turn is not None and self.current is not None and member.has != event.round:
            waited_s = None if turn.handed_over_at is None else now - turn.handed_over_at
            since = turn.began_at if member.merged_at is None else member.merged_at
            self.current.began(member.source.worker, waited_s, now - since, self.sent_bytes[0])
        member.merged_at, member.has = now, event.round
        if member.plan is not None and not member.plan.evaluate:
            member.progress.heard_at = now
            self._done_if_final(member)

    # ── from arrivals to weights ──────────────────────────────────────────────────────────────────────────────────

    def _go_on(self, now: float) -> None:
        """Give idle workers a turn, and have merged what has arrived: one reduction at a time, of all that is there."""
        if not self.open or self.final or self._inflow.reducing:
            return
        for rejection in self._inflow.stale():
            self._reject(rejection, now)
        for member in self._idle():
            self._give_turn(member, now)
        if not self._inflow.arrived:
            return
        if self.grace_until is None:
            self.grace_until = now + self._turns.grace_s(self._roster.free)
        if not self._training or now >= self.grace_until:
            self._reduce()

    def _give_turn(self, member: Member, now: float) -> None:
        assert self.current is not None
        worker, share, step = member.source.worker, self._share(member), self._inflow.step
        handed_over_at = self._handed_over_at.pop(worker, None)
        at = self._trained() / self._job.rounds.samples_between_updates
        commands = self._turns.turn(step, member, self._fleet(member), share, at, now)
        self._training[worker] = Turn(step, self._inflow.merged, now, handed_over_at, bool(share))
        batches = {worker: member.plan and member.plan.batches}
        self._out.note("plan", now, round=self.current.number, batches=batches, predicted_s=None, step=step)
        self._out.put(*commands)

    def _reduce(self) -> None:
        assert self.current is not None
        self.grace_until = None
        since = min((turn.step for turn in self._training.values()), default=None)
        self._out.put(self._inflow.reduce(self.current, since))

    def reduced(self, verdict: Verdict, now: float) -> list[Source]:
        """Take deltas in, and commit a period that is whole; returns the workers that are excluded."""
        current = self.current
        if current is None or not self._inflow.awaits(verdict):
            return []
        self._roster.refused({self._inflow.reducing[r.worker].delta.source for r in verdict.rejected if r.blamed})
        for one, arrival, staleness in self._inflow.answered(verdict):
            current.taken.append((one, arrival, staleness))
            self._turns.settle(one.worker, arrival.delta.spans)
            self._tally.count(arrival.delta)
            self._roster.contributed(one.worker)
            who = {"worker": one.worker, "incarnation": one.incarnation, "staleness": staleness}
            self._out.note("arrival", now, round=current.number, step=self._inflow.step, **who)
        for rejection in verdict.rejected:
            self._reject(rejection, now)
        if self._inflow.hopeless:
            blamed = [rejection for rejection in verdict.rejected if rejection.blamed]
            self._out.finish(diverged(current.number, blamed[0].reason))
            return []
        excluded = self._strike(verdict, now)
        if current.whole:
            self._end(current, verdict.update_norm, now)
        else:
            self._go_on(now)
        return excluded

    def _reject(self, rejection: Rejection, now: float) -> None:
        """Note that a delta is no part of the weights; its samples are given out again."""
        assert self.current is not None
        self._turns.ledger.release(rejection.worker)
        self.current.rejected.append(rejection)
        self._out.note("reject", now, round=self.current.number, worker=rejection.worker, reason=rejection.reason)

    def _end(self, current: Period, update_norm: float, now: float) -> None:
        """Have a period written down; the next one begins at once, if there are workers enough."""
        self._settle(now)
        self._records.write_down(now)
        members = self._roster.members
        verdict = current.end(update_norm, len(members), now)
        current.batch_s = known_batch_s(members)
        self._inflow.commit(current.number)
        self._persist(current, verdict, current.spans, now, **self._inflow.state())
        self._records.landing.append(current)
        self.next = current.number + 1

    def _call_off(self) -> None:
        """The last commit is made: what is still trained, or has arrived since, is of no use."""
        for worker in (*self._training, *self._inflow.arrived):
            self._turns.ledger.release(worker)
        self._training.clear()
        self._inflow.arrived.clear()
        self._records.evaluation = None

    def _settle(self, now: float) -> None:
        """Write the records that are complete; end the run after the last evaluation."""
        evaluation = self._records.evaluation
        if evaluation is not None and evaluation.lost and not self.final and not self._inflow.committed:
            self._records.evaluation = None  # Nobody who comes will have its weights.
        self._records.settle_evaluation(now)
        if self._records.evaluation is None and self.next is None:
            self._records.write_down(now)
            if self.final:
                self._out.finish(None)

    def close_books(self, now: float) -> None:
        """Wait no longer for an evaluation."""
        self._records.evaluation = None
        self._records.write_down(now)

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _idle(self) -> list[Member]:
        """Workers that may be given a turn; while a number's delta is on its way, it is open what of it is used."""
        occupied = self._inflow.workers | self._training.keys()
        occupied |= {slot.number for slot in self._roster.slots.values() if slot.excluded}
        return [member for member in self._roster.free if member.source.worker not in occupied]

    def _fleet(self, member: Member) -> list[Member]:
        """All that share the work, this worker among them."""
        free = self._roster.free
        return [one for one in self._roster.members if one is member or one in free]

    def _share(self, member: Member) -> tuple[Span, ...]:
        """What a worker evaluates, if it is to get the weights for that now."""
        if self._records.evaluation is None or self.commit_before(self._inflow.step) != self._records.evaluation.number:
            return ()
        return self._records.evaluation.pending.get(member.source.worker, ())

    def _trained(self) -> int:
        """Samples of the run that were trained on: merged, on their way, and reported."""
        reported = sum(one.progress.samples for one in self._roster.members if one.source.worker in self._training)
        return self._tally.samples + self._inflow.samples + reported
