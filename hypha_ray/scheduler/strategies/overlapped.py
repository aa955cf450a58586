"""The course of a run with several exchanges under way: rounds go on being trained while results of earlier ones come.

    training n ──deltas in──► in flight: n-1, n ──verdict, in order──► landing: n-1 ──merged by all──► written down
         ▲                          │
         └── round n+1, as soon as the weights that are due in it are there

Deltas are reduced one round after the other, so commits are in order. Meanwhile deltas of later rounds travel up,
and results of earlier ones down. A joining worker begins with the newest weights, and is sent all results after these.
"""

from __future__ import annotations

from collections import deque

from hypha_ray.config import Job
from hypha_ray.scheduler.failures import disowned
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.round_planner import RoundPlanner
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.rounds.round import Round
from hypha_ray.scheduler.strategies.barrier import BarrierRounds
from hypha_ray.types import Event, Merged, Source, Span, Verdict


class OverlappedRounds(BarrierRounds):
    """Rounds with several exchanges in flight; for the arguments, see `BarrierRounds`."""

    def __init__(self, job: Job, past: ResumePoint, roster: Roster, assigner: RoundPlanner, out: Outbox) -> None:
        super().__init__(job, past, roster, assigner, out)
        self._in_flight: deque[Round] = deque()
        """Rounds whose deltas are in, oldest first; that one is being reduced."""

    # ── what the core asks ────────────────────────────────────────────────────────────────────────────────────────

    def accepts(self, member: WorkerState, event: Event) -> bool:
        """Whether a worker speaks of the present round, or of weights that it may not have had before."""
        if isinstance(event, Merged):
            return (-1 if member.merged_version is None else member.merged_version) < event.round <= self.latest_version
        return super().accepts(member, event)

    def begin(self, now: float) -> None:
        """Plan the next round, and tell every worker."""
        super().begin(now)
        assert self.current is not None
        self.current.overlapped |= self._planner.due(self.current.number + 1) <= self.current.number

    def forget(self, member: WorkerState, now: float) -> None:
        """Wait no longer for a lost worker. What it has handed over stays, and others take over what it hasn't."""
        worker, current = member.source.worker, self.current
        self._reported_samples -= member.progress.samples
        self._pending.forget(worker)
        self._planner.ledger.release(worker, self._delivered_by(worker))
        if current is not None and not current.closed and worker not in current.deltas:
            current.awaiting.discard(worker)
            self.correct_plans(now, urgent=True)
            self._close_if_complete(now)
        self._settle(now)

    def discard_delta(self, source: Source) -> None:
        """Leave out what a worker has handed over that isn't being reduced: it began with wrong weights."""
        super().discard_delta(source)
        for one in list(self._in_flight)[1:]:
            if one.discard_delta(source) and not one.deltas:
                self._out.finish(disowned(one.number))

    # ── from the deltas to the weights ────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Have reduced what is there, in its turn; the next round may begin before that, if no result of it is due."""
        assert self.current is not None
        self._in_flight.append(self.current)
        for member in self._roster.members:
            member.rest_if_idle()
        super().close()
        self._advance()

    def _send_to_server(self, done: Round) -> None:
        """Have a round's deltas reduced, unless those of another one are."""
        if done is self._in_flight[0]:
            super()._send_to_server(done)

    def _advance(self) -> None:
        """Let the next round begin, if the weights are there that are due in it."""
        current = self.current
        if current is not None and current.closed and self._planner.due(current.number + 1) <= self.latest_version:
            self.next = current.number + 1

    def reduced(self, verdict: Verdict, now: float) -> list[Source]:
        """Commit the oldest round in flight, and send its result to all; returns the workers that are excluded."""
        if not self._in_flight or verdict.round != self._in_flight[0].number:
            return []
        done = self._in_flight.popleft()
        self._pending.stop_waiting(done.weights_version, now)
        excluded = self._decide(done, verdict, now)
        if self._out.over:
            return []
        for member in self._roster.assignable:
            if member.plan is not None:
                self._out.put(*self._planner.send_weights(member, self.latest_version))
        if self._in_flight:
            self._send_to_server(self._in_flight[0])
        self._advance()
        return excluded

    def _spans_of_later_rounds(self) -> dict[int, tuple[Span, ...]]:
        """Samples of rounds after the committed one: handed over, in plans, or begun with."""
        current, kept = self.current, {worker: self._delivered_by(worker) for worker in self._roster.slots}
        for member in self._roster.members:
            worker = member.source.worker
            if current is not None and not current.closed and worker in current.awaiting - current.deltas.keys():
                kept[worker] += member.assigned
            kept[worker] += member.overlap_spans
        return {worker: spans for worker, spans in kept.items() if spans}

    def _delivered_by(self, worker: int) -> tuple[Span, ...]:
        """Samples behind a worker's deltas that are in and not committed."""
        taken = [*self._in_flight, *([self.current] if self.current is not None and not self.current.closed else [])]
        return tuple(span for one in taken if worker in one.deltas for span in one.deltas[worker].spans)
