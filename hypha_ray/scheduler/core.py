"""The scheduler's brain: a state machine without I/O. An event and the time go in, commands come out.

    starting ──all ready──► training ──deltas in──► reducing ──verdict──► training … ──last round──► over
                               ▲                                             │
                               └─────────────────────────────────────────────┘

The same core runs under Ray and in tests. Times are monotonic seconds, passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypha_ray.config import Job
from hypha_ray.errors import CapacityError, ConfigError
from hypha_ray.scheduler import commands as c
from hypha_ray.scheduler.assigner import Assigner, Sizes
from hypha_ray.scheduler.fleet import Member
from hypha_ray.scheduler.rounds import Evaluation, Round, step_record
from hypha_ray.types import Delta, Evaluated, Event, Failed, Merged, Ready, Report, SliceInfo, Source, Verdict


class Core:
    """Decides for one run.

    Args:
        job: the job file.
        sources: the workers that are starting.
        slices: the dataset's slices, of both splits.
        sizes: bytes and limits.
        now: the time.

    """

    def __init__(
        self, job: Job, sources: Sequence[Source], slices: Sequence[SliceInfo], sizes: Sizes, now: float
    ) -> None:
        self._job, self._sizes = job, sizes
        self._assigner = Assigner(job, slices, sizes)
        self._starting = {source.worker: source for source in sources}
        self._members: dict[int, Member] = {}
        self._round: Round | None = None
        self._reducing = False
        self._closing: Round | None = None
        """The round before, until every worker has merged its result."""
        self._evaluation: Evaluation | None = None
        self._began_at = now
        self._totals = {"samples_total": 0, "tokens_total": 0}
        self._out: list[c.Command] = []
        self.deadline: float | None = now + job.resources.start_deadline_s
        """When the core wants a `Tick` at the latest."""
        self.over = False

    def handle(self, event: c.Input, now: float) -> list[c.Command]:
        """Take in one event; returns what has to be done about it, in order."""
        self._out = []
        if not self.over:
            match event:
                case c.Tick():
                    self._tick(now)
                case c.Reduced(verdict=verdict):
                    self._reduced(verdict, now)
                case c.Lost(source=source, reason=reason):
                    self._lost(source, reason, now)
                case Ready():
                    self._ready(event, now)
                case Failed(error=error):
                    self._finish(error)
                case Event():
                    self._heard(event, now)
        return self._out

    # ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _fleet(self) -> list[Member]:
        return [self._members[worker] for worker in sorted(self._members)]

    def _ready(self, event: Ready, now: float) -> None:
        source = event.source
        if self._starting.get(source.worker) != source:
            return
        del self._starting[source.worker]
        self._members[source.worker] = Member(source, self._job.rounds.max_batch_size)
        self._note("join", now, worker=source.worker, incarnation=source.incarnation, device=event.device)
        if not self._starting and self._round is None:
            self._begin_training(now)

    def _begin_training(self, now: float) -> None:
        self.deadline, self._began_at = None, now
        self._begin(0, now)

    def _tick(self, now: float) -> None:
        if self.deadline is None or now < self.deadline:
            return
        self.deadline = None
        if self._round is not None:
            self._close()
        elif len(self._members) < self._job.resources.min_workers:
            self._finish(self._too_few("were ready by the start deadline"))
        else:
            for source in self._starting.values():
                self._out.append(c.Dismiss(source.worker, "not ready by the start deadline"))
            self._starting.clear()
            self._begin_training(now)

    def _lost(self, source: Source, reason: str, now: float) -> None:
        member = self._members.get(source.worker)
        known = self._starting.get(source.worker) if member is None else member.source
        if known != source:
            return
        self._members.pop(source.worker, None)
        self._starting.pop(source.worker, None)
        self._note("loss", now, worker=source.worker, incarnation=source.incarnation, reason=reason)
        self._out.append(c.Dismiss(source.worker, reason))
        if len(self._members) + len(self._starting) < self._job.resources.min_workers:
            self._finish(self._too_few(f"are left; the last one went because: {reason}"))
        elif self._round is None:
            if not self._starting:
                self._begin_training(now)
        else:
            self._forget(source.worker, now)

    def _forget(self, worker: int, now: float) -> None:
        """Wait no longer for a lost worker, and let the others take its share over."""
        assert self._round is not None
        if self._closing is not None:
            self._closing.merging.discard(worker)
        if self._evaluation is not None and worker in self._evaluation.pending:
            self._evaluation.lose(worker)
        if not self._reducing and worker not in self._round.deltas:
            self._assigner.ledger.release(worker)
            self._round.expected.discard(worker)
            self._correct(now)
            self._close_if_complete()
        self._settle(now)

    def _too_few(self, what: str) -> CapacityError:
        have, need = len(self._members), self._job.resources.min_workers
        return CapacityError(
            "CAP002", f"{have} workers of at least {need} {what}", fix="look into the logs, then resubmit"
        )

    # ── a round ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, number: int, now: float) -> None:
        self._round, commands = self._assigner.open(number, self._fleet, now)
        if self._round.evaluating:
            self._evaluation = Evaluation(number - 1, set(self._round.evaluators))
        batches = {member.source.worker: member.plan.batches for member in self._fleet if member.plan is not None}
        self._note("plan", now, round=number, batches=batches, predicted_s=self._round.predicted_s)
        self._out += commands

    def _heard(self, event: Event, now: float) -> None:
        member, current = self._members.get(event.source.worker), self._round
        if member is None or member.source != event.source or current is None or event.round != current.number:
            self._note("stale", now, worker=event.source.worker, round=event.round)
            return
        match event:
            case Report():
                member.report(event, now)
                current.learning_rate = event.learning_rate
                samples = sum(one.progress.samples for one in self._fleet)
                self._out.append(c.Record(step_record(event, samples, self._job.rounds.samples_between_updates)))
                self._correct(now)
            case Delta():
                self._delivered(member, event, now)
            case Merged():
                self._merged(member, now)
            case Evaluated():
                member.progress.heard_at = now
                self._evaluated(event, now)

    def _correct(self, now: float) -> None:
        current = self._round
        if current is None or self._reducing or not current.expected:
            return
        late = [member for member in self._fleet if member.source.worker in current.expected - set(current.deltas)]
        saved_s, commands = self._assigner.correct(current, late, now)
        if commands:
            self._note("correction", now, round=current.number, saved_s=saved_s)
            self._out += commands

    def _delivered(self, member: Member, delta: Delta, now: float) -> None:
        current, worker = self._round, member.source.worker
        if current is None or self._reducing or worker in current.deltas or worker not in current.expected:
            self._note("stale", now, worker=worker, round=delta.round)
            return
        current.deltas[worker], current.delivered_at[worker] = delta, now
        member.delivered(delta, now - current.started_at, current.evaluating)
        if len(current.deltas) == self._job.sync.quorum:
            self.deadline = now + self._job.sync.grace_s
        self._correct(now)
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        if self._round is not None and self._round.deltas and set(self._round.deltas) == self._round.expected:
            self._close()

    def _close(self) -> None:
        """Reduce what is there; meanwhile send ahead what the next round will probably need."""
        assert self._round is not None
        self._reducing, self.deadline = True, None
        deltas = [delta for _, delta in sorted(self._round.deltas.items())]
        uniform = self._job.sync.weighting == "uniform"
        samples = tuple(1 if uniform else delta.samples for delta in deltas)
        self._out.append(c.Reduce(self._round.number, tuple(delta.source for delta in deltas), samples))
        self._out += self._assigner.feed_ahead(self._fleet)

    def _reduced(self, verdict: Verdict, now: float) -> None:
        current = self._round
        if current is None or not self._reducing or verdict.round != current.number:
            return
        self._close_books(now)
        for rejection in verdict.rejected:
            self._note("reject", now, round=current.number, worker=rejection.worker, reason=rejection.reason)
        if not verdict.accepted:
            self._finish(_diverged(current.number, verdict.rejected[0].reason))
            return
        spans = {one.worker: current.deltas[one.worker].spans for one in verdict.accepted}
        self._assigner.commit(spans)
        ledger = self._assigner.ledger
        used = tuple(sorted(spans.items()))
        self._out.append(c.Persist(current.number, verdict, used, ledger.cursors(), ledger.epoch, ledger.ahead()))
        current.verdict, current.merging, self._closing = verdict, set(self._members), current
        for member in self._fleet:
            member.rest_if_idle()
        current.batch_s = {m.source.worker: m.batch_time.mean for m in self._fleet if m.batch_time.mean is not None}
        self._reducing = False
        self._begin(current.number + 1, now)

    # ── the end of a round, and of the run ────────────────────────────────────────────────────────────────────────

    def _merged(self, member: Member, now: float) -> None:
        if self._closing is not None:
            self._closing.merged(member.source.worker, member.merged_at, now)
        member.merged_at = now
        if member.plan is not None and not member.plan.evaluate:
            member.progress.heard_at = now
        self._settle(now)

    def _evaluated(self, event: Evaluated, now: float) -> None:
        if self._evaluation is not None:
            self._evaluation.take(event)
            self._settle(now)

    def _settle(self, now: float) -> None:
        """Write the records that are complete; end the run after those of the last round."""
        if self._evaluation is not None and not self._evaluation.pending:
            record = self._evaluation.record()
            if record is not None:
                self._out.append(c.Record({**record, "elapsed_s": now - self._began_at}))
            self._evaluation = None
        if self._closing is not None and not self._closing.merging and self._evaluation is None:
            self._out.append(c.Record(self._round_record(self._closing, now)))
            self._closing = None
        last = self._round is not None and self._round.number == self._job.rounds.update_rounds
        if last and self._closing is None and self._evaluation is None:
            self._finish(None)

    def _close_books(self, now: float) -> None:
        """Wait no longer for a worker that slept through a whole round: write the last round's record without it."""
        if self._evaluation is not None:
            for worker in list(self._evaluation.pending):
                self._evaluation.lose(worker)
        if self._closing is not None:
            self._closing.merging.clear()
        self._settle(now)

    def _finish(self, error: Exception | None) -> None:
        self.over, self.deadline = True, None
        self._out.append(c.Finish(error))

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _round_record(self, closing: Round, now: float) -> dict[str, Any]:
        record = closing.record(self._sizes.theta_bytes, self._job.rounds.update_rounds)
        for total in self._totals:
            self._totals[total] += record[total.removesuffix("_total")]
        elapsed_s, done = now - self._began_at, closing.number + 1
        eta_s = elapsed_s / done * (self._job.rounds.update_rounds - done)
        return {**record, **self._totals, "elapsed_s": elapsed_s, "eta_s": eta_s, "epoch": self._assigner.ledger.epoch}

    def _note(self, kind: str, now: float, **fields: Any) -> None:
        self._out.append(c.Note({"kind": kind, "monotonic_s": now, **fields}))


def _diverged(number: int, reason: str) -> ConfigError:
    what = f"training diverged: every delta of round {number} was rejected, the first for {reason}"
    return ConfigError("TRN001", what, fix="lower inner_optimizer.learning_rate, or set inner_optimizer.clip_norm")
