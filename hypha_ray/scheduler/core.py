"""Core of the scheduler: a state machine without I/O. An event and the time go in, commands come out.

    starting ──weights and workers there──► training ──deltas in──► reducing ──verdict──► training … ──► over
                                               ▲                        │
                                               └── waiting for machines ◄┘  while fewer than are needed

Workers come and go in every state, see `roster.py`; the states are classes, see `round_strategy.py`. The
same core runs under Ray and in simulations. Times are monotonic seconds, passed in.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hypha_ray import types as t
from hypha_ray.config import Job
from hypha_ray.errors import CapacityError
from hypha_ray.fleet_time import FleetTime
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.asynchronous.async_planner import AsyncPlanner
from hypha_ray.scheduler.asynchronous.strategy import AsyncRounds
from hypha_ray.scheduler.barrier.round_planner import RoundPlanner
from hypha_ray.scheduler.barrier.strategy import BarrierRounds
from hypha_ray.scheduler.failures import FATAL, WeightHashes, another_model, fatal, fruitless, hopeless, too_few
from hypha_ray.scheduler.goal_planner import GoalPlanner
from hypha_ray.scheduler.messages import Outbox, ResumePoint
from hypha_ray.scheduler.planner import StorePace, check_interval_s
from hypha_ray.scheduler.roster import LostWorker, Roster
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.scheduler.worker_state import WorkerState
from hypha_ray.types import SliceInfo

log = logging.getLogger(__name__)

OBJECTS_PER_WORKER = 20
"""New objects, per worker, after which Python searches for garbage."""


def search_less_often(workers: int) -> None:
    """Search for garbage less often in the process of a large fleet's core.

    The core's objects are kept, form no cycles, and grow in number with the fleet. At Python's default of 700 new
    objects, searches among them take a third of the core's time with 10 000 workers.
    """
    first_threshold, *other_thresholds = gc.get_threshold()
    gc.set_threshold(max(first_threshold, OBJECTS_PER_WORKER * workers), *other_thresholds)


def strategy_of(
    job: Job, slices: Sequence[SliceInfo], sizes: Sizes, resume_point: ResumePoint, roster: Roster, out: Outbox
) -> BarrierRounds | AsyncRounds:
    """Create the strategy of a job: rounds with a barrier, or deltas merged as they arrive."""
    if not job.sync.traits.has_barrier:
        return AsyncRounds(job, resume_point, roster, AsyncPlanner(job, slices, sizes, resume_point), out)
    return BarrierRounds(job, resume_point, roster, RoundPlanner(job, slices, sizes, resume_point), out)


@dataclass(frozen=True, slots=True)
class FleetView:
    """Workers and rounds of a run, as its core sees them; to be read only."""

    needed: int
    """Workers without which no round begins."""
    roster: Roster
    """Slots of the workers, with their leases and states."""
    strategy: BarrierRounds | AsyncRounds
    """State of the rounds; `strategy.plans.ledger` knows the samples of each worker."""


class SchedulerCore:
    """Makes all decisions of one run, on slices of both splits."""

    def __init__(
        self, job: Job, run: str, slices: Sequence[t.SliceInfo], sizes: Sizes, resume_point: ResumePoint
    ) -> None:
        self._job = job
        self._resume_point = resume_point
        self._resources = job.resources
        self._needed = job.num_workers if job.run.mode == "replay" else self._resources.min_workers
        self._out = c.Outbox()
        self._roster = Roster(job, run, resume_point.attempt, resume_point.next_round)
        self._roster.restore(resume_point.state.get("workers", {}))
        self._roster.recall_loss(resume_point.lost_s)
        self._strategy = strategy_of(job, slices, sizes, resume_point, self._roster, self._out)
        self._goal_planner = GoalPlanner(job, resume_point, self._roster, self._strategy, self._out)
        self._weight_hashes = WeightHashes()
        self._layout_sha256: str | None = None
        self._starters: set[t.Source] = set()
        """Workers that the first round waits for."""
        self._unchecked: set[t.Source] = set()
        """Workers that joined while no round was open, so that their layouts are unchecked."""
        self._timers: dict[str, float] = {}
        self._next_timer_at = math.inf
        """Earliest of the timers, which `_set_timer` and `_stop_timer` change."""
        self._check_s = check_interval_s(job.num_workers, job.lease_s)
        """Seconds between two checks for silent workers and empty slots."""
        self._store_pace = StorePace(resume_point.next_round, self._out)

    def start(self, fitting_workers: Collection[int], now: float) -> list[c.Command]:
        """Hire workers; the first round waits for `fitting_workers`, the others come when there is room."""
        resume_point = self._resume_point
        self._out.event("attempt", now, attempt=resume_point.attempt, next_round=resume_point.next_round)
        for text in resume_point.skipped:
            self._out.problem(text, now)
        self._roster.open(fitting_workers, now)
        self._goal_planner.begin(now)
        self._hire(now)
        self._starters = set(self._roster.starting)
        if fitting_workers:
            self._set_timer("start", now + self._resources.start_deadline_s)
        else:
            self._set_timer("idle", now + self._resources.max_idle_s)
        self._set_timer("check", now + self._check_s)
        return self._out.take()

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self._out.over

    @property
    def deadline(self) -> float:
        """Latest time of the next `Tick`."""
        grace_until = self._strategy.grace_until
        return self._next_timer_at if grace_until is None else min(self._next_timer_at, grace_until)

    def view(self) -> FleetView:
        """Workers and rounds, to be read only."""
        return FleetView(self._needed, self._roster, self._strategy)

    def time_fields(self, round: int, samples: int) -> dict[str, Any]:
        """Return fields about the time of fleet and workers, for the record of a round among the last commands."""
        times = self._roster.times
        fields = times.recorded(round).record(samples)
        times_by_worker = times.recorded_by_worker(round)
        fields["time_by_worker"] = {str(worker): time.used() for worker, time in times_by_worker.items()}
        return fields

    def plan_reasons(self, workers: Iterable[int]) -> dict[str, Any]:
        """Reasons of these workers' plans, as fields of a `plan` event among the last commands."""
        return self._strategy.plan_reasons(workers)

    @property
    def closing_time(self) -> FleetTime | None:
        """The fleet's time after the last record; None unless the run has ended well."""
        return self._roster.times.closing

    def arrived(self, event: t.Event, now: float) -> None:
        """Renew a worker's lease when its event arrives, which may be well before it is handled."""
        self._roster.renew_lease(event.source, now, progress=not isinstance(event, t.Alive))

    def handle(self, event: c.Input, now: float) -> list[c.Command]:
        """Handle one event; return commands, in order."""
        if self._out.over:
            return []
        self._roster.times.forget_recorded()
        if now > self._next_timer_at and now - self._timers["check"] > self._check_s:
            self._forgive_own_absence(now)
        try:
            self._handle_event(event, now)
        except Exception as error:
            if not self._lose_sender(event, error, now):
                raise
        out = self._out
        if not out.over:
            self._tick(now)
        if not out.over:
            self._begin_if_staffed(now)
        if not out.over:
            self._limit_waiting(now)
        if out.ended_well:
            self._roster.end(now)
        return out.take()

    def _handle_event(self, event: c.Input, now: float) -> None:
        match event:
            case t.Event():
                self._record_event(event, now)
            case c.Initialised(theta_bytes=size, theta_sha256=theta, layout_sha256=layout, part_bytes=parts):
                self._strategy.sent_bytes = (size, parts or (size,))
                self._layout_sha256 = layout
                self._record_commit(self._resume_point.next_round - 1, theta, now)
            case c.Reduced(verdict=verdict):
                self._commit(verdict, now)
            case c.Committed(saved=t.Saved(commit=commit, problem=problem)):
                self._store_pace.wrote(commit.round)
                if problem is not None:
                    self._out.problem(problem, now)
                self._record_commit(commit.round, commit.theta_sha256, now)
            case c.Leased(source=source):
                self._roster.leased(source, now)
            case c.PlacementFailed():
                self._lose_worker(event.source, event.reason, now)
            case c.Lost():
                was_present = self._lose_at_work(event.source, event.reason, now)
                if was_present and self._roster.broke_down(event.source.worker, event.exception):
                    common_exception = event.exception if self._roster.breaks_alike else None
                    self._give_up(hopeless(event.reason, common_exception), now)
            case c.Draining(workers=workers, reason=reason):
                working = [worker for worker in workers if self._roster.slots[worker].working]
                self._out.put(*(c.Drain(worker, reason) for worker in working))
            case c.Quotes():
                self._goal_planner.quoted(event, now)
                self._hire(now)
            case c.SchedulerFailed(error=error):
                self._out.finish(error)

    def _commit(self, verdict: t.Verdict, now: float) -> None:
        """Commit a round; workers are excluded for their deltas, and leave or are hired by the run's goal."""
        for source in self._strategy.reduced(verdict, now):
            self._lose_worker(source, f"excluded after {self._job.sync.strikes} rejected deltas", now)
        if self._job.goal.is_set:
            self._goal_planner.committed(now)
            self._hire(now)

    def _lose_sender(self, event: c.Input, error: Exception, now: float) -> bool:
        """Drop a worker whose event can't be handled, with its state; False if the event isn't a worker's."""
        if not isinstance(event, t.Event) or isinstance(event, t.Failed):
            return False
        log.error("an event of worker %d can't be handled: %s", event.source.worker, event, exc_info=error)
        was_lost = self._lose_worker(event.source, f"its {type(event).__name__} event can't be handled: {error}", now)
        if was_lost:
            self._roster.slots[event.source.worker].member = None
        return was_lost

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _forgive_own_absence(self, now: float) -> None:
        """Extend all limits by a pause of the scheduler's own process, because events of that time are still unread."""
        late_s = now - self._timers["check"]
        self._roster.defer(late_s)
        self._strategy.defer(late_s)
        for name, ends_at in self._timers.items():
            self._set_timer(name, ends_at + late_s)

    def _set_timer(self, name: str, ends_at: float) -> None:
        self._timers[name] = ends_at
        self._next_timer_at = min(self._timers.values())

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            del self._timers[name]
            self._next_timer_at = min(self._timers.values())

    def _tick(self, now: float) -> None:
        """Act on timers that are over. Events that keep coming must not hide silent workers."""
        ended_timers = self._end_timers(now) if now >= self._next_timer_at else []
        self._strategy.make_up_corrections(now)
        grace_until = self._strategy.grace_until
        if grace_until is not None and now >= grace_until:
            self._strategy.close(now)
        if "start" in ended_timers:
            self._stop_waiting_for_starters(now)
        if "idle" in ended_timers:
            self._give_up(self._too_few(f"were there for {self._resources.max_idle_s:g} s"), now)

    def _end_timers(self, now: float) -> list[str]:
        """Check for silent workers and empty slots if that is due; return the names of timers that are over."""
        ended_timers = [name for name, ends_at in self._timers.items() if now >= ends_at]
        if "check" in ended_timers:
            self._set_timer("check", now + self._check_s)
            for loss in self._roster.silent(now, self._strategy.busy):
                self._lose_without_end(loss, now)
            self._hire(now)
        for name in {*ended_timers} - {"check"}:
            self._stop_timer(name)
        return ended_timers

    def _stop_waiting_for_starters(self, now: float) -> None:
        """At the start deadline continue with the ready workers, if they are enough."""
        late_starters = self._starters
        self._starters = set()
        if self._roster.assignable_count < self._needed:
            self._give_up(self._too_few("were ready by the start deadline"), now)
            return
        for source in sorted(late_starters, key=attrgetter("worker")):
            self._lose_worker(source, "not ready by the start deadline", now)

    def _give_up(self, error: Exception, now: float) -> None:
        """End a run for lack of workers; after its last commit it ends well, without the evaluation."""
        if self._strategy.trained:
            self._strategy.stop_waiting(now)
            self._out.finish(None)
        else:
            self._out.finish(error)

    # ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _hire(self, now: float) -> None:
        for source in self._roster.hire(now):
            self._out.event("hire", now, worker=source.worker, incarnation=source.incarnation)
            self._out.put(c.Hire(source))

    def _record_event(self, event: t.Event, now: float) -> None:
        """Handle a worker's event, unless it has lost its lease or the event isn't of the current round."""
        source = event.source
        is_trusted = self._roster.renew_lease(source, now, progress=not isinstance(event, t.Alive))
        if is_trusted and isinstance(event, t.Merged) and event.theta_sha256 is not None:
            is_trusted = self._has_right_weights(source, event.version, event.theta_sha256, now)
        member = self._roster.member(source)
        match event:
            case t.Report() | t.Delta() | t.Merged() | t.Evaluated() if (
                is_trusted and member and self._strategy.accepts(member, event)
            ):
                self._strategy.handle(member, event, now)
            case t.Alive(work=work, limited=limited, machine=machine):
                if is_trusted:
                    self._roster.works_on(source, work, limited, machine, now)
            case t.Ready() if is_trusted:
                self._admit(event, now)
            case t.Leaving(reason=reason) if is_trusted:
                if self._roster.leave(source):
                    self._out.event("leaving", now, worker=source.worker, incarnation=source.incarnation, reason=reason)
                    self._strategy.correct_plans(now)
            case t.Left() if is_trusted:
                self._lose_worker(source, "left", now, blame=False)
            case t.Damaged() | t.RolloutReport() | t.ModelWorkersRevived() | t.WorkerWarned() if is_trusted:
                self._out.logged(event, now)
            case t.Failed(error=error) if is_trusted:
                self._out.finish(error)
            case _:
                self._out.stale(event, now)

    def _admit(self, event: t.Ready, now: float) -> None:
        source = event.source
        member = self._roster.ready(source, now, event.batch_size)
        if member is None:
            return
        self._starters.discard(source)
        member.layout = event.layout
        self._out.event("join", now, worker=source.worker, incarnation=source.incarnation, **event.machine)
        if not self._strategy.open:
            self._unchecked.add(source)
        elif self._builds_the_model([member], now):
            self._strategy.join(member, now)

    def _lose_worker(self, source: t.Source, reason: str, now: float, blame: bool = True) -> bool:
        """Empty a worker's slot, give its work to others, and hire a successor; False if it wasn't in the slot."""
        member = self._roster.member(source)
        if not self._roster.release(source, now, blame):
            return False
        self._starters.discard(source)
        self._weight_hashes.forget(source)
        worker = source.worker
        incarnation = source.incarnation
        self._out.event("loss" if blame else "leave", now, worker=worker, incarnation=incarnation, reason=reason)
        self._out.put(c.Dismiss(source.worker, reason))
        if member is not None:
            self._strategy.forget(member, now)
        self._hire(now)
        return True

    def _lose_at_work(self, source: t.Source, reason: str, now: float) -> bool:
        """Lose a worker that died or hangs; end the run if its work has ended others, too."""
        work, losses = self._roster.lost_at(source)
        was_present = self._lose_worker(source, reason, now)
        if was_present and self._roster.is_fatal(work):
            self._give_up(fatal(work, reason), now)
        elif was_present and losses == FATAL:
            repeated_reason = f"worker {source.worker} was lost {losses} times in a row at {work}, and no other one was"
            self._out.problem(f"{repeated_reason}: its next starts wait longer, so see to its machine", now)
        return was_present

    def _lose_without_end(self, loss: LostWorker, now: float) -> None:
        """Lose a worker that is given up; end the run if that happens to all, again and again."""
        was_present = self._lose_at_work(loss.source, loss.reason, now)
        if was_present and loss.cause is not None and self._roster.broke_down(loss.source.worker, loss.cause):
            is_common = self._roster.breaks_alike
            self._give_up(fruitless(loss.reason, loss.is_silent) if is_common else hopeless(loss.reason, None), now)

    def _limit_waiting(self, now: float) -> None:
        """Limit the time that the run waits with fewer workers than it needs."""
        have = self._roster.assignable_count
        strategy = self._strategy
        if not (strategy.pending.share_is_lost if strategy.final else have < self._needed):
            self._stop_timer("idle")
        elif self._roster.eligible < self._needed:
            model_error = another_model(self._resume_point.next_round, self._roster.layouts, self._layout_sha256)
            self._give_up(model_error or self._too_few("can be had: the others are excluded, see events.jsonl"), now)
        elif not {"start", "idle"} & self._timers.keys():
            limit_s = self._resources.start_deadline_s if strategy.trained else self._resources.max_idle_s
            self._set_timer("idle", now + limit_s)
            self._out.event("waiting", now, workers=have, needed=self._needed)

    def _begin_if_staffed(self, now: float) -> None:
        """Begin the next round once weights and workers are there, and the store isn't too far behind."""
        round_number = self._strategy.next
        if (
            round_number is None
            or self._layout_sha256 is None
            or self._starters
            or self._store_pace.holds(round_number, now)
        ):
            return
        joined = sorted(self._unchecked, key=attrgetter("worker"))
        self._unchecked = set()
        self._builds_the_model(filter(None, map(self._roster.member, joined)), now)
        if self._roster.assignable_count >= self._needed and not self.over:
            self._stop_timer("start")
            self._strategy.begin(now)

    # ── trust ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _builds_the_model(self, members: Iterable[WorkerState], now: float) -> bool:
        """Exclude workers whose model has another layout than the server's."""
        unlike_members = [member for member in members if member.layout != self._layout_sha256]
        reason = "it builds another model: its libraries differ from the server's"
        for member in unlike_members:
            self._roster.exclude(member.source.worker)
            self._out.event("exclude", now, worker=member.source.worker, reason=reason)
            self._lose_worker(member.source, reason, now)
        return not unlike_members

    def _record_commit(self, round: int, theta_sha256: str, now: float) -> None:
        mismatched = self._weight_hashes.record_commit(round, theta_sha256)
        self._reject_joiners(mismatched, now)

    def _has_right_weights(self, source: t.Source, version: t.WeightsVersion, theta_sha256: str, now: float) -> bool:
        committed_round = self._strategy.commit_before(version)
        if committed_round is None or self._weight_hashes.check(source, committed_round, theta_sha256):
            return True
        self._reject_joiners([source], now)
        return False

    def _reject_joiners(self, sources: Sequence[t.Source], now: float) -> None:
        for source in sources:  # All deltas first: a loss may close the round.
            self._strategy.discard_delta(source)
        for source in sources:
            self._lose_worker(source, "it began with other weights than were committed", now)

    def _too_few(self, predicate: str) -> CapacityError:
        return too_few(self._roster.assignable_count, self._needed, predicate)
