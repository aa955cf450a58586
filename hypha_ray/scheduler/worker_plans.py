"""Plans of workers: samples, slices and weights, shares of an evaluation, and the reasons for their sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypha_ray.config import Job
from hypha_ray.config.schema import rounds_for
from hypha_ray.scheduler.ledger import Ledger
from hypha_ray.scheduler.messages import Assign, Command, Feed, Merge, RestoreInnerState, ResumePoint
from hypha_ray.scheduler.mixture import Mixture
from hypha_ray.scheduler.planner import Allocation
from hypha_ray.scheduler.round_sizes import RoundSizes
from hypha_ray.scheduler.worker_state import WorkerState, batch_seconds, has_equal_batches
from hypha_ray.types import Plan, SliceInfo, Span, WeightsVersion, window

EQUAL = "equal"
"""All workers get equally many batches."""
SPEED = "speed"
"""The worker's own speed, so that all finish together."""
NOISE = "noise"
"""The worker's own speed, and fewer batches because its times differ from batch to batch."""
UNKNOWN = "unknown speed"
"""The worker has reported no batch, so that it counts as fast as the fleet's median."""
NOT_NEEDED = "not needed"
"""The worker has no batch, as the others are done by the time its first one would end."""
BEAT = "beat"
"""Without a barrier: the worker's own speed, so that its local round ends with those of the others."""
REST = "rest"
"""There are no more samples at the end of the run."""


@dataclass(slots=True)
class ReasonBook:
    """Reasons of workers' plans."""

    reasons: dict[int, str] = field(default_factory=dict)
    """Reason by worker, one of those above."""
    finish_s: dict[int, float | None] = field(default_factory=dict)
    """Seconds from the plan to the expected delta by worker; None if its speed is unknown, or it has no batch."""

    def explain(self, member: WorkerState, reason: str, allocated: int, evaluating: bool = False) -> None:
        """Explain a worker's plan.

        Args:
            member: the worker, with its plan.
            reason: the reason of the batches that it was to have.
            allocated: number of these batches.
            evaluating: whether it evaluates first.

        """
        worker = member.source.worker
        batch_s = member.batch_time.mean
        batches = member.planned
        self.reasons[worker] = REST if batches < allocated else reason
        self.finish_s[worker] = None
        if batch_s is not None and batches:
            self.finish_s[worker] = (member.overhead[evaluating].mean or 0.0) + batches * batch_s

    def fields(self, workers: Iterable[int]) -> dict[str, Any]:
        """Fields of a `plan` event of these workers."""
        explained = [worker for worker in workers if worker in self.reasons]
        return {
            "reasons": {worker: self.reasons[worker] for worker in explained},
            "finish_s": {worker: self.finish_s[worker] for worker in explained},
        }


def reason_of(member: WorkerState, exact_allocation: Allocation, allocation: Allocation) -> str:
    """Reason of a worker's batches in a round of unequal batches.

    Args:
        member: the worker.
        exact_allocation: allocation by the workers' speeds.
        allocation: allocation with margins for noise.

    """
    worker = member.source.worker
    if member.batch_time.mean is None:
        return UNKNOWN
    if allocation.batches[worker] < exact_allocation.batches[worker]:
        return NOISE
    return SPEED if allocation.batches[worker] else NOT_NEEDED


class ValidationSamples:
    """Samples of the validation split, divided among the workers.

    Args:
        job: the job file.
        slices: the dataset's slices, of both splits.
        resume_point: point from which the run goes on.

    """

    def __init__(self, job: Job, slices: Sequence[SliceInfo], resume_point: ResumePoint) -> None:
        self._every = job.rounds.evaluate_every
        self._equal = has_equal_batches(job)
        self._spans = tuple(Span(0, info.index, 0, info.samples) for info in slices if info.split == "validation")
        self._samples = sum(span.samples for span in self._spans)
        self._evaluated = resume_point.next_round if resume_point.evaluated else None
        """Version of the weights whose evaluation an earlier attempt has recorded; None without one."""

    def is_due(self, round_number: int, is_final: bool) -> bool:
        """Whether the weights that a round starts from are to be evaluated; the final round has no training."""
        if not self._spans or round_number <= 0 or round_number == self._evaluated:
            return False
        return is_final or (self._every > 0 and round_number % self._every == 0)

    def shares(self, members: Sequence[WorkerState]) -> dict[int, tuple[Span, ...]]:
        """Validation samples for each worker, in proportion to its speed."""
        seconds = batch_seconds(members, self._equal)
        speeds: dict[int, float] = {}
        for member in members:
            worker = member.source.worker
            speeds[worker] = member.batch_size / seconds[worker]
        shares: dict[int, tuple[Span, ...]] = {}
        start = 0
        cumulated = 0.0
        total = sum(speeds.values())
        for worker, speed in speeds.items():
            cumulated += speed
            stop = round(self._samples * cumulated / total)
            if stop > start:
                shares[worker] = window(self._spans, start, stop)
            start = stop
        return shares


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limit of a worker's memory, and slices that are near it.

    Attributes:
        held_samples: samples that a worker may hold.
        nearby: slices by worker that it is to get before others. The owner of the mapping adds workers as they come.

    """

    held_samples: int
    nearby: Mapping[int, frozenset[int]] = field(default_factory=dict)


class WorkerPlans:
    """Makes the commands of plans, and keeps the ledger.

    Args:
        job: the job file.
        slices: the dataset's slices, of both splits.
        sizes: limits.
        resume_point: point from which the run goes on.
        most_samples: samples that a worker may be given at once.

    """

    def __init__(
        self, job: Job, slices: Sequence[SliceInfo], sizes: Sizes, resume_point: ResumePoint, most_samples: int
    ) -> None:
        self._job = job
        self._sizes = sizes
        self._fixed = job.run.mode == "replay"
        self._behind = job.sync.in_flight - 1
        self._samples = {info.index: info.samples for info in slices}
        self._largest_slice = max(self._samples.values(), default=0)
        self._assigned: set[int] = set()
        """Workers that were given samples since the last commit."""
        self.round_sizes = RoundSizes(job, resume_point.state)
        self.ends_by_samples = job.rounds.epochs is not None
        """Whether the run ends when all samples of its epochs are used, in whatever number of rounds."""
        self.reserve = 0
        """Available samples that aren't to be assigned now, if the run ends by samples: they are for others, or later
        rounds."""
        train = [info for info in slices if info.split == "train"]
        self.ledger: Ledger | Mixture
        if weights := [share.weight for share in job.dataset.mix]:
            self.ledger = Mixture(
                train,
                weights,
                job.run.seed,
                most_samples,
                resume_point.used,
                resume_point.state.get("mixture", {}),
                job.rounds.epochs,
            )
        else:
            self.ledger = Ledger.restore(train, job.run.seed, resume_point.used, most_samples, job.rounds.epochs)

    def resize(self, job: Job) -> None:
        """Go on with rounds of another length, and another number of them."""
        self._job = job

    @property
    def used_up(self) -> bool:
        """Whether the run ends by samples, and commits have used all of them."""
        return self.ends_by_samples and self.ledger.unused == 0

    def is_over(self, round_number: int) -> bool:
        """Whether a round is the one after the last; if the run ends by samples, all before it must be committed."""
        if self.ends_by_samples:
            return self.used_up
        return round_number == self._job.rounds.update_rounds

    def expected_rounds(self, committed_rounds: int) -> int:
        """Number of rounds of the whole run, as far as is known after so many commits."""
        if not self.ends_by_samples:
            return self._job.rounds.update_rounds
        unused = self.ledger.unused
        rounds = committed_rounds + rounds_for(self._job, unused, committed_rounds)
        if unused and self._job.sync.traits.has_barrier:
            return max(rounds, self._job.rounds.update_rounds)
        return rounds

    def share_among(self, workers: int) -> None:
        """Let the next of so many workers have its part of the available samples, if the run ends by samples."""
        if self.ends_by_samples:
            available = self.ledger.available
            self.reserve = available - -(-available // workers)

    @property
    def free_samples(self) -> int:
        """Samples that may be assigned now, if the run ends by samples."""
        return max(0, self.ledger.available - self.reserve)

    def assign(self, member: WorkerState, samples: int, reserved: int = 0) -> tuple[Span, ...]:
        """Assign samples to a worker, fewer if at the end of a run no more are free beside `reserved` ones.

        In replay mode its cache plays no part, so that every run assigns the same.
        """
        worker = member.source.worker
        self._assigned.add(worker)
        if self.ends_by_samples:
            samples = min(samples, max(0, self.free_samples - reserved))
        cached = () if self._fixed else member.cached_slices
        nearby_slices = self._sizes.nearby.get(worker)
        if nearby_slices and isinstance(self.ledger, Ledger):
            return self.ledger.assign(worker, samples, cached, member.batch_size, nearby_slices)
        return self.ledger.assign(worker, samples, cached, member.batch_size)

    def feed(self, member: WorkerState, slices: Sequence[int]) -> list[Command]:
        """Send the slices that the worker lacks; it never drops a slice that is needed now."""
        needed_slices = dict.fromkeys(slices)
        limit = self._sizes.held_samples
        if len(needed_slices) * self._largest_slice > limit:
            limit = max(limit, sum(self._samples[index] for index in needed_slices))
        feeds: list[Command] = []
        for index in needed_slices:
            if member.cache_slice(index, self._samples[index], limit):
                feeds.append(Feed(member.source.worker, index))
        return feeds

    def feed_spans(self, member: WorkerState, spans: Sequence[Span]) -> list[Command]:
        """Send the slices of spans that the worker lacks."""
        return self.feed(member, [span.slice for span in spans])

    def feed_ahead(self, samples: int, members: Sequence[WorkerState]) -> list[Command]:
        """Send the slices that a next round of that many samples probably needs, while the server reduces."""
        nearby_slices = self._sizes.nearby
        if nearby_slices:
            samples = sum(self._samples.values())
        upcoming_slices = deque(self.ledger.upcoming(samples))
        commands: list[Command] = []
        for member in members:
            missing = member.planned_samples
            nearby = nearby_slices.get(member.source.worker)
            if nearby:  # The order is stable: nearby slices come first.
                upcoming_slices = deque(sorted(upcoming_slices, key=lambda index: index not in nearby))
            while missing > 0 and upcoming_slices:
                index = upcoming_slices.popleft()
                missing -= self._samples[index]
                commands += self.feed(member, [index])
        return commands

    def standing(self, member: WorkerState, spans: Sequence[Span]) -> dict[str, Any]:
        """Fields of a plan with these samples that depend on what the worker has."""
        restores = member.needs_inner_state and bool(spans)
        return {"keep": frozenset(member.cached_slices), "restores": restores, "rejections": member.rejections}

    def start(self, member: WorkerState, plan: Plan, newest_version: WeightsVersion) -> list[Command]:
        """Send a worker its plan of a round, which has its `standing`, the weights and, if needed, the inner state."""
        worker = member.source.worker
        member.start(plan)
        member.untrained = member.untrained and not plan.spans
        commands: list[Command] = [Assign(worker, plan)]
        if plan.restores:
            commands.append(RestoreInnerState(worker))
        return commands + self.send_weights(member, newest_version)

    def send_weights(self, member: WorkerState, newest_version: WeightsVersion) -> list[Command]:
        """Send a worker the newest weights, unless it was sent them.

        All fragments go to a worker without weights, with weights to drop, or behind by more versions than exchanges.
        """
        if member.sent_version == newest_version:
            return []
        merged = member.merged_version
        sends_all = (
            member.sent_version != newest_version - 1 or merged is None or merged < newest_version - 1 - self._behind
        )
        member.sent_version = newest_version
        member.full_version = newest_version if sends_all else member.full_version
        return [Merge(member.source.worker, newest_version, sends_all)]

    def correct(self, member: WorkerState, batches: int, now: float) -> list[Command]:
        """Send a new version of a worker's plan. Samples cut off stay assigned: the worker may have used them."""
        assert member.plan is not None
        if batches == member.planned:
            return []
        if member.idle:
            member.progress.heard_at = now  # The worker didn't report because it had nothing to do.
        samples = batches * member.batch_size
        missing = samples - sum(span.samples for span in member.assigned)
        if missing > 0:
            member.assigned += self.assign(member, missing)
        spans = window(member.assigned, 0, samples)
        if spans == member.plan.spans:  # No samples are left to add.
            return []
        feeds = self.feed_spans(member, (*member.plan.evaluate, *spans, *member.overlap_spans))
        version = member.plan.version + 1
        plan = replace(member.plan, version=version, spans=spans, keep=frozenset(member.cached_slices))
        member.follow(plan)
        return [*feeds, Assign(member.source.worker, plan)]

    def state(self) -> dict[str, Any]:
        """State for a `ResumePoint`, beside the used samples: the shares of a mixture, and the length of rounds."""
        shares = {"mixture": self.ledger.shares()} if isinstance(self.ledger, Mixture) else {}
        return {**shares, **self.round_sizes.state()}

    def commit(self, spans: Mapping[int, Sequence[Span]], ahead_spans: Mapping[int, Sequence[Span]]) -> None:
        """Mark samples as used, and release all others except those of later rounds."""
        self.ledger.commit(spans)
        for worker in self._assigned:
            self.ledger.release(worker, ahead_spans.get(worker, ()))
        self._assigned = set(ahead_spans)
