"""Planning without a barrier: the next local round of one worker at a time, sized by dynamic local updates.

With dynamic local updates (arXiv 2401.09135, section 5) a worker gets batches in proportion to its speed, so that all
deliver at about the same time and few train from old weights. So local rounds end on a common *beat*: a worker that
begins at another time gets one shorter or longer round. Otherwise all workers get equally many batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.scheduler.messages import Command, ResumePoint
from hypha_ray.scheduler.planner import Allocation, CorrectionPace
from hypha_ray.scheduler.planner import plan as plan_batches
from hypha_ray.scheduler.worker_plans import (
    BEAT,
    EQUAL,
    UNKNOWN,
    ReasonBook,
    Sizes,
    ValidationSamples,
    WorkerPlans,
)
from hypha_ray.scheduler.worker_state import (
    UNKNOWN_BATCH_S,
    WorkerState,
    batch_seconds,
    batch_size,
    has_equal_batches,
    paces_at_start,
    typical_seconds,
)
from hypha_ray.types import Plan, SliceInfo, Span, WeightsVersion

RESIZE_GAIN = 0.1
"""Relative error of a local round's length above which it is resized, if that is more than a batch."""


class AsyncPlanner:
    """Makes and resizes the plans of local rounds."""

    def __init__(self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, resume_point: ResumePoint) -> None:
        self._job = job
        self._equal = has_equal_batches(job)
        self._target_samples = job.rounds.samples_between_updates
        self._beat: float | None = None
        """Time at which local rounds that begin now should end; None before the first."""
        self._speeds_pace = CorrectionPace(job.num_workers)
        """Limits how often the speeds of a large fleet are computed."""
        self._allocation = Allocation(0.0, {}, 0)
        self._fleet_speed = 0.0
        """Samples per second of the whole fleet."""
        self._typical_s = UNKNOWN_BATCH_S
        """Seconds per batch of a worker that hasn't reported any."""
        self.reasons = ReasonBook()
        """Reasons of each worker's newest plan."""
        self._ends: dict[int, float] = {}
        """Time at which each worker's local round should end, if that was known when it began."""
        most_local_samples = self._local_round_samples(job.num_workers)  # One worker may have to do the work of all.
        self.plans = WorkerPlans(job, slices, sizes, resume_point, most_local_samples + batch_size(job))
        self._validation = ValidationSamples(job, slices, resume_point)

    @property
    def size(self) -> int:
        """Number of deltas in a round."""
        return self._job.sync.period or self._job.num_workers

    def _local_round_samples(self, workers: int) -> int:
        """Samples of all workers' local rounds together, so that the deltas of a round have a round's samples."""
        return -(-self._target_samples * workers // self.size)

    def eval_shares(
        self, round_number: int, members: Sequence[WorkerState], is_final: bool
    ) -> dict[int, tuple[Span, ...]]:
        """Each worker's share in the evaluation of the weights that a round begins with; empty if none is due."""
        if not self._validation.is_due(round_number, is_final):
            return {}
        return self._validation.shares(members)

    def plan_local_round(
        self,
        version: WeightsVersion,
        member: WorkerState,
        fleet: Sequence[WorkerState],
        share: tuple[Span, ...],
        trained_rounds: float,
        now: float,
    ) -> list[Command]:
        """Plan a worker's next local round; `share` is evaluated first, and `trained_rounds` is the run's progress."""
        batches = self._batches(member, fleet, now)
        spans = self.plans.assign(member, batches * member.batch_size)
        rounds = self._job.rounds.update_rounds
        progress = min(trained_rounds, rounds), min(trained_rounds + self._length_in_rounds(member, spans), rounds)
        feeds = self.plans.feed_spans(member, (*share, *spans))
        fields = self.plans.standing(member, spans)
        plan = Plan(version, 0, spans, member.batch_size, share, progress=progress, **fields)
        orders = self.plans.start(member, plan, version)
        self.reasons.explain(member, self._reason(member), batches, bool(share))
        return [*feeds, *orders]

    def plan_last(self, version: WeightsVersion, member: WorkerState, share: tuple[Span, ...]) -> list[Command]:
        """Send a worker its final plan: evaluate its share, then end."""
        feeds = self.plans.feed_spans(member, share)
        last_plan = Plan(version, 0, (), member.batch_size, share, final=True, **self.plans.standing(member, ()))
        return [*feeds, *self.plans.start(member, last_plan, version)]

    def resize(self, member: WorkerState, fleet: Sequence[WorkerState], began_at: float, now: float) -> list[Command]:
        """Resize a worker's local round after its report, so that it ends on the beat."""
        batch_s = member.batch_time.mean
        if self._equal or batch_s is None or member.plan is None:
            return []
        end = self._ends.get(member.source.worker)
        if end is None:
            self._measure(fleet, now)
            end = began_at + self._allocation.finish_s
        further_batches = max(1, int((end - now) / batch_s))
        batches = self._limit_batches(member, member.progress.batches + further_batches)
        if abs(batches - member.plan.batches) <= max(1, RESIZE_GAIN * member.plan.batches):
            return []
        return self.plans.correct(member, batches, now)

    def grace_s(self, fleet: Sequence[WorkerState]) -> float:
        """Time that a delta waits for others; local rounds on one beat end within about a batch of each other."""
        configured_s = self._job.sync.arrival_grace_s
        if configured_s is not None or self._equal:
            return configured_s or 0.0
        return max((member.batch_time.mean or 0.0 for member in fleet), default=0.0)

    def settle(self, worker: int, spans: Sequence[Span]) -> None:
        """Mark the samples of a worker's delta as used, and release the rest of its local round."""
        self.plans.ledger.commit({worker: spans})
        self.plans.ledger.release(worker)

    def _batches(self, member: WorkerState, fleet: Sequence[WorkerState], now: float) -> int:
        """Batches of a local round, so that the deltas of a round have about a round's samples."""
        self._measure(fleet, now)
        if self._equal:
            return -(-self._target_samples // (self.size * member.batch_size))
        allocation = self._allocation
        batch_s = member.batch_time.mean
        worker = member.source.worker
        typical_batches = int(allocation.finish_s / (batch_s or self._typical_s))
        batches = allocation.batches.get(worker, typical_batches)
        if batch_s is None:
            self._ends.pop(worker, None)
            return max(1, batches)
        end = self._ends[worker] = self._next_beat(allocation.finish_s, now)
        if abs(end - now - allocation.finish_s) < 1e-6 * allocation.finish_s:
            return max(1, batches)
        overhead_s = member.overhead[False].mean or 0.0
        return self._limit_batches(member, int((end - now - overhead_s) / batch_s))

    def _reason(self, member: WorkerState) -> str:
        """Reason of the length of a worker's local round."""
        if self._equal:
            return EQUAL
        return UNKNOWN if member.batch_time.mean is None else BEAT

    def _limit_batches(self, member: WorkerState, batches: int) -> int:
        """Limit a number of batches to at least one and at most a worker's limit."""
        limit = self._local_round_samples(self._job.num_workers) // member.batch_size + 1
        return min(max(1, batches), limit)

    def _next_beat(self, length_s: float, now: float) -> float:
        """End of a local round of about that length: the present beat, or the next one if less than half is left.

        It is at most one and a half times that length: longer rounds were planned when speeds were different.
        """
        if self._beat is None or not now <= self._beat <= now + 1.5 * length_s:
            self._beat = now + length_s
        elif self._beat - now < length_s / 2:
            self._beat += length_s
        return self._beat

    def _measure(self, fleet: Sequence[WorkerState], now: float) -> None:
        """Compute the fleet's speed, and divide the samples of one local round of all workers among them."""
        if not self._speeds_pace.allows(now):
            return
        seconds = batch_seconds(fleet, equal_batches=False)
        self._typical_s = typical_seconds(fleet)
        self._fleet_speed = sum(member.batch_size / seconds[member.source.worker] for member in fleet)
        paces = paces_at_start(fleet, evaluating=False, equal_batches=False)
        self._allocation = plan_batches(paces, self._local_round_samples(len(fleet)))

    def _length_in_rounds(self, member: WorkerState, spans: Sequence[Span]) -> float:
        """Progress of the fleet, in rounds, while a worker trains on these spans."""
        batch_s = member.batch_time.mean
        speed = member.batch_size / (self._typical_s if batch_s is None else batch_s)
        round_samples = self._target_samples * (speed / self._fleet_speed)
        return sum(span.samples for span in spans) / round_samples
