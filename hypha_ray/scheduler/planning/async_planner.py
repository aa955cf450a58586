"""Planning without a barrier: one worker's next turn at a time, sized by dynamic local updates.

With dynamic local updates (arXiv 2401.09135, section 5) a worker gets batches in proportion to its speed, so that all
hand over at about the same time and few train from old weights. For that turns end with a common *beat*: a worker that
begins at another time than the others gets a shorter or longer one, once. Without, all get equally many batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.scheduler.fleet.worker_state import (
    UNKNOWN_BATCH_S,
    WorkerState,
    batch_seconds,
    batch_size,
    has_equal_batches,
    paces_at_start,
    typical_seconds,
)
from hypha_ray.scheduler.messages import Command
from hypha_ray.scheduler.planning.correction_pace import CorrectionPace
from hypha_ray.scheduler.planning.planner import Allocation
from hypha_ray.scheduler.planning.planner import plan as plan_batches
from hypha_ray.scheduler.planning.validation import ValidationSamples
from hypha_ray.scheduler.planning.worker_plans import Sizes, WorkerPlans
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.types import Plan, SliceInfo, Span, WeightsVersion

RESIZE_GAIN = 0.1
"""A turn is made longer or shorter once it is wrong by this part of its length, and by more than a batch."""


class AsyncPlanner:
    """Makes and resizes the plans of local rounds."""

    def __init__(self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, past: ResumePoint) -> None:
        self._job, self._equal = job, has_equal_batches(job)
        self._target = job.rounds.samples_between_updates
        self._beat: float | None = None
        """Time at which turns that begin now are to end."""
        self._speeds_pace = CorrectionPace(job.num_workers)
        """Interval at which the speeds of a large fleet are looked at."""
        self._allocation = Allocation(0.0, {}, 0)
        self._fleet_speed = 0.0
        """Samples per second of the whole fleet."""
        self._typical_s = UNKNOWN_BATCH_S
        """Seconds per batch of a worker that hasn't reported any."""
        self._ends: dict[int, float] = {}
        """Time at which each worker's turn is to end, if that was known at its beginning."""
        everything = self._everything(job.num_workers)  # A worker may have to do the share of all.
        self.plans = WorkerPlans(job, slices, sizes, past, everything + batch_size(job))
        self._validation = ValidationSamples(job, slices, past)

    @property
    def size(self) -> int:
        """Deltas that make a round."""
        return self._job.sync.period or self._job.num_workers

    def _everything(self, workers: int) -> int:
        """Samples of one turn of each of so many workers, so that the deltas of a round have a round's samples."""
        return -(-self._job.rounds.samples_between_updates * workers // self.size)

    def eval_shares(self, number: int, members: Sequence[WorkerState]) -> dict[int, tuple[Span, ...]]:
        """Evaluation share of each of these workers, of the weights that a round begins with; empty if none is due."""
        return self._validation.shares(members) if self._validation.is_due(number) else {}

    def plan_local_round(
        self,
        version: WeightsVersion,
        member: WorkerState,
        fleet: Sequence[WorkerState],
        share: tuple[Span, ...],
        at: float,
        now: float,
    ) -> list[Command]:
        """Give a worker its next turn.

        Args:
            version: version of the weights that it begins with.
            member: the worker.
            fleet: all that are at work, itself among them.
            share: what it evaluates first.
            at: where the run is on its schedule, in rounds.
            now: the time, in seconds.

        """
        spans = self.plans.assign(member, self._batches(member, fleet, now) * member.batch_size)
        rounds = self._job.rounds.update_rounds
        progress = min(at, rounds), min(at + self._length(member, spans), rounds)
        feeds = self.plans.feed(member, [span.slice for span in (*share, *spans)])
        plan = Plan(version, 0, spans, member.batch_size, share, progress=progress)
        return [*feeds, *self.plans.start(member, plan, version)]

    def plan_last(self, version: WeightsVersion, member: WorkerState, share: tuple[Span, ...]) -> list[Command]:
        """Tell a worker that there is nothing more to train; it evaluates its share, and ends."""
        feeds = self.plans.feed(member, [span.slice for span in share])
        last = Plan(version, 0, (), member.batch_size, share, final=True)
        return [*feeds, *self.plans.start(member, last, version)]

    def resize(self, member: WorkerState, fleet: Sequence[WorkerState], began_at: float, now: float) -> list[Command]:
        """Let a worker that has just reported end its turn when it should, by what is known now."""
        batch_s = member.batch_time.mean
        if self._equal or batch_s is None or member.plan is None:
            return []
        end = self._ends.get(member.source.worker)
        if end is None:
            self._look_at(fleet, now)
            end = began_at + self._allocation.finish_s
        batches = self._bounded(member, member.progress.batches + max(1, int((end - now) / batch_s)))
        if abs(batches - member.plan.batches) <= max(1, RESIZE_GAIN * member.plan.batches):
            return []
        return self.plans.correct(member, batches, now)

    def grace_s(self, fleet: Sequence[WorkerState]) -> float:
        """Time that a delta waits for others: turns that are to end together do so within a batch or so."""
        given = self._job.sync.arrival_grace_s
        if given is not None or self._equal:
            return given or 0.0
        return max((one.batch_time.mean or 0.0 for one in fleet), default=0.0)

    def settle(self, worker: int, spans: Sequence[Span]) -> None:
        """Count what a worker's delta was trained on as used, and take the rest of its turn back."""
        self.plans.ledger.commit({worker: spans})
        self.plans.ledger.release(worker)

    def _batches(self, member: WorkerState, fleet: Sequence[WorkerState], now: float) -> int:
        """Batches of a turn: as many deltas as make a round have a round's samples, more or less."""
        self._look_at(fleet, now)
        if self._equal:
            return -(-self._target // (self.size * member.batch_size))
        allotted, batch_s, worker = self._allocation, member.batch_time.mean, member.source.worker
        batches = allotted.batches.get(worker, int(allotted.finish_s / (batch_s or self._typical_s)))
        if batch_s is None:
            self._ends.pop(worker, None)
            return max(1, batches)
        end = self._ends[worker] = self._next_beat(allotted.finish_s, now)
        if abs(end - now - allotted.finish_s) < 1e-6 * allotted.finish_s:
            return max(1, batches)
        return self._bounded(member, int((end - now - (member.overhead[False].mean or 0.0)) / batch_s))

    def _bounded(self, member: WorkerState, batches: int) -> int:
        """So many batches, but at least one, and at most a worker's limit."""
        return min(max(1, batches), self._everything(self._job.num_workers) // member.batch_size + 1)

    def _next_beat(self, length_s: float, now: float) -> float:
        """End of a turn of about that length: with the turns that have begun, unless these are half over.

        One and a half times that length is the longest: if others take longer, speeds were others when they began.
        """
        if self._beat is None or not now <= self._beat <= now + 1.5 * length_s:
            self._beat = now + length_s
        elif self._beat - now < length_s / 2:
            self._beat += length_s
        return self._beat

    def _look_at(self, fleet: Sequence[WorkerState], now: float) -> None:
        """Learn how fast the fleet is, and share out a turn of all: as many samples as belong to their number."""
        if not self._speeds_pace.allows(now):
            return
        seconds = batch_seconds(fleet, equal=False)
        self._typical_s = typical_seconds(fleet)
        self._fleet_speed = sum(one.batch_size / seconds[one.source.worker] for one in fleet)
        paces = paces_at_start(fleet, evaluating=False, equal=False)
        self._allocation = plan_batches(paces, self._everything(len(fleet)))

    def _length(self, member: WorkerState, spans: Sequence[Span]) -> float:
        """Progress of the whole fleet, in rounds, while a worker trains on these spans."""
        batch_s = member.batch_time.mean
        speed = member.batch_size / (self._typical_s if batch_s is None else batch_s)
        return sum(span.samples for span in spans) / (self._target * (speed / self._fleet_speed))
