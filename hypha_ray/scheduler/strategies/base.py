"""State and steps that all strategies share: which round goes on, what is written down, and when a worker is done."""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.worker_plans import WorkerPlans
from hypha_ray.scheduler.resume_point import ResumePoint, RunTotals
from hypha_ray.scheduler.rounds.pending import PendingRounds
from hypha_ray.scheduler.rounds.round import Round
from hypha_ray.types import Evaluated, Verdict


class RoundStrategy:
    """Round that goes on, and the books of those before it.

    Args:
        job: the job file.
        past: point from which the run goes on.
        roster: workers of the fleet.
        plans: plans of the workers.
        out: takes commands.

    """

    def __init__(self, job: Job, past: ResumePoint, roster: Roster, plans: WorkerPlans, out: Outbox) -> None:
        self._job, self._roster, self._plans, self._out = job, roster, plans, out
        self.next: int | None = past.next_round
        """Round that is to begin; None while one goes on."""
        self.latest_version = past.next_round
        """Version of the newest weights, those after the last commit; round n begins version n."""
        self.current: Round | None = None
        self._totals = RunTotals(past.state.get("totals", {}))
        self._pending = PendingRounds(job, self._totals, plans.ledger, out)
        self.sent_bytes: tuple[int, tuple[int, ...]] = 0, ()
        """Bytes of all of θ, and of each fragment."""
        self.grace_until: float | None = None
        """Time at which the round ends without the deltas that aren't in; None: not yet, or no more."""

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
        return self._pending.evaluation is not None and bool(self._pending.evaluation.lost)

    def defer(self, seconds: float) -> None:
        """The scheduler itself was stopped for a while: the grace time is so much longer."""
        self.grace_until = None if self.grace_until is None else self.grace_until + seconds

    def correct_plans(self, now: float, urgent: bool = False) -> None:
        """Adapt plans to what has become of other workers; without a barrier nothing depends on them."""

    def make_up_corrections(self, now: float) -> None:
        """Correct plans, if that was put off for long enough."""

    def _settle(self, now: float) -> None:
        """Write the records that are complete; end the run after those of the last round."""
        self._pending.settle(now)
        if self.final and self._pending.empty:
            self._out.finish(None)

    def _evaluated(self, member: WorkerState, event: Evaluated, now: float) -> None:
        member.progress.heard_at = now
        if self._pending.evaluation is not None:
            self._pending.evaluation.take(event)
        self._done_if_final(member)
        self._settle(now)

    def _done_if_final(self, member: WorkerState) -> None:
        if member.plan is not None and member.plan.final and member.merged_version == member.plan.round:
            self._roster.done(member.source.worker)

    def _persist(self, current: Round, verdict: Verdict, used: c.Used, now: float, **more: int) -> None:
        """Have a round's weights written down, and all that a later scheduler needs beside them."""
        current.totals, ledger = self._totals.totals(now), self._plans.ledger
        state = {"totals": current.totals, "workers": self._roster.state(), **more}
        figures = (ledger.cursors(), ledger.epoch, ledger.ahead(), state)
        self._out.put(c.Persist(current.number, verdict, used, *figures))
