"""State of a worker as the core knows it, with running estimates of its speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.schema import Sync
from hypha_ray.scheduler.planner import SECONDS, Floats, Pace
from hypha_ray.types import Contribution, Delta, Plan, Report, Source, Span, WeightsVersion

UNKNOWN_BATCH_S = 1.0
"""Seconds per batch assumed before any report; it is equal for all workers, so it only sets the scale."""

IDLE_FADE = 0.5
"""Factor on a worker's batch time after a round without a batch."""


class Decayed:
    """Exponentially decayed mean of durations in seconds, such as those of uploads.

    * The first observation is taken as it is; from then on the mean lies between the least and the greatest one.
    * An outlier is more than `outlier` times as large or as small as the mean. A single one counts as if it were at
      that limit. After two in a row on the same side, the estimate restarts from the nearer of the two.
    * A value that is no duration (negative, NaN, or longer than a planner accepts) has no effect.

    Args:
        half_life: number of observations after which earlier ones count half.
        outlier: largest ratio between an observation and the mean that counts in full.

    """

    __slots__ = ("_doubted", "_half_life", "_outlier", "_weight", "mean")

    def __init__(self, half_life: float = 3.0, outlier: float = 2.0) -> None:
        self._half_life = half_life
        self._outlier = outlier
        self._weight = 0.0
        self._doubted: float | None = None
        self.mean: float | None = None
        """Estimate in seconds; None before the first observation."""

    def observe(self, seconds: float, count: int = 1) -> None:
        """Take in the mean of `count` durations."""
        if not self._is_duration(seconds) or count < 1:
            return
        if self.mean is None or not self._weight:
            self._restart(seconds, count)
        else:
            self._follow(self.mean, seconds, count)

    def fade(self, factor: float) -> None:
        """Multiply the estimate by `factor` (0 to 1); the next observation replaces it.

        After a round without an observation, so that an old bad figure doesn't leave a worker without work for ever.
        """
        if self.mean is not None:
            self.mean *= factor
            self._weight = 0.0
            self._doubted = None

    def _is_duration(self, seconds: float) -> bool:
        return 0 <= seconds <= SECONDS[1]

    def _restart(self, seconds: float, count: int) -> None:
        self.mean = seconds
        self._doubted = None
        self._weight = self._gain(count)

    def _follow(self, mean: float, seconds: float, count: int) -> None:
        believed_s = min(max(seconds, mean / self._outlier), mean * self._outlier)
        earlier_doubt_s = self._doubted
        self._doubted = None if believed_s == seconds else seconds
        if self._doubted is not None and earlier_doubt_s is not None and (earlier_doubt_s > mean) == (seconds > mean):
            nearer_s = min(earlier_doubt_s, seconds) if seconds > mean else max(earlier_doubt_s, seconds)
            self._restart(nearer_s, count)
            return
        gain = self._gain(count)
        self._weight = gain + (1 - gain) * self._weight
        share = gain / self._weight
        moved = mean + share * (believed_s - mean)
        self.mean = min(max(moved, min(mean, believed_s)), max(mean, believed_s))

    def _gain(self, count: int) -> float:
        """Weight of `count` new observations against an infinite past."""
        return float(1 - 0.5 ** (count / self._half_life))


class BatchTime(Decayed):
    """A worker's seconds per batch, within a planner's limits. A round's first batch is warm-up and isn't observed."""

    __slots__ = ("variance",)

    def __init__(self, half_life: float = 16.0, outlier: float = 2.0) -> None:
        super().__init__(half_life, outlier)
        self.variance = 0.0
        """Relative variance of a single batch's time."""

    @property
    def spread(self) -> float:
        """Standard deviation of a single batch's time, relative to the mean; 0 before the second observation."""
        return math.sqrt(self.variance)

    def _follow(self, mean: float, seconds: float, count: int) -> None:
        believed_s = min(max(seconds, mean / self._outlier), mean * self._outlier)
        deviation = believed_s / mean - 1
        gain = self._gain(1)  # Each deviation counts the same, for any number of batches.
        self.variance += gain * (count * deviation**2 - self.variance)
        super()._follow(mean, seconds, count)

    def fade(self, factor: float) -> None:
        """Multiply the estimate, see `Decayed`; it stays within a planner's limits."""
        super().fade(factor)
        if self.mean is not None:
            self.mean = max(self.mean, SECONDS[0])

    def _is_duration(self, seconds: float) -> bool:
        return super()._is_duration(seconds) and seconds >= SECONDS[0]


@dataclass(slots=True)
class Progress:
    """Reports of a worker in its current round, summed."""

    batches: int = 0
    samples: int = 0
    heard_at: float | None = None
    """Time of the last report, or of the first batch's start; None before."""


@dataclass(slots=True)
class WorkerState:
    """One worker of the fleet. Times are the scheduler's monotonic clock, in seconds."""

    source: Source
    batch_size: int
    batch_time: BatchTime = field(default_factory=BatchTime)
    overhead: dict[bool, Decayed] = field(default_factory=lambda: {False: Decayed(), True: Decayed()})
    """Seconds of a round besides batches (merge, first batch, upload); by whether it has an evaluation."""
    assigned: tuple[Span, ...] = ()
    overlap_spans: tuple[Span, ...] = ()
    """Samples of the next round, which the worker trains on before it has that round's plan."""
    prestarted_batches: int = 0
    """Number of batches of the round that it may have trained before the plan."""
    plan: Plan | None = None
    planned_samples: int = 0
    """Number of samples in the plan."""
    planned: int = 0
    """Number of batches in the plan."""
    progress: Progress = field(default_factory=Progress)
    cached_slices: dict[int, int] = field(default_factory=dict)
    """Slices sent to the worker, with their numbers of samples, oldest first."""
    cached_samples: int = 0
    """Number of samples in these slices."""
    merged_at: float | None = None
    merged_version: WeightsVersion | None = None
    """Version of the weights merged last; None before the first, or if the worker has to drop its own weights."""
    sent_version: WeightsVersion | None = None
    """Version of the weights sent last; None before the first."""
    full_version: WeightsVersion | None = None
    """Version of the weights last sent with all fragments; None before the first."""
    layout: str = ""
    """Hash of the layout of the model that the worker has built."""
    untrained: bool = True
    """Whether the worker has had no plan with samples yet."""
    needs_inner_state: bool = False
    """Whether the worker takes over its predecessor's inner state before it trains."""
    rejections: int = 0
    """Number of the worker's deltas that were rejected."""

    @property
    def idle(self) -> bool:
        """Whether the worker has nothing to train on in its round."""
        return self.plan is None or not self.plan.spans

    def start(self, plan: Plan) -> None:
        """Begin a round."""
        self.assigned = plan.spans
        self.progress = Progress()
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Replace the plan by another version."""
        self.plan = plan
        self.planned_samples = plan.samples
        self.planned = -(-self.planned_samples // plan.batch_size)

    def report(self, report: Report, now: float) -> None:
        """Add a report's progress and batch times."""
        self.progress.batches += report.batches
        self.progress.samples += report.samples
        self.progress.heard_at = now
        if report.timed_batches:
            self.batch_time.observe(report.seconds / report.timed_batches, report.timed_batches)

    def delivered(self, delta: Delta, seconds: float, evaluated: bool) -> None:
        """Learn how much of `seconds` weren't batches; the first round is left out, because it warms up caches.

        All of it counts as batches if none was timed, as of a slow worker with one batch a round: unknown, it would be
        planned for as a fast one.
        """
        if delta.round == 0:
            return
        batch_s = self.batch_time.mean
        if batch_s is None:
            if delta.batches and not evaluated:
                self.batch_time.observe(seconds / delta.batches)
        else:
            self.overhead[evaluated].observe(max(0.0, seconds - delta.batches * batch_s))

    def rest_if_idle(self) -> None:
        """Let the batch time fade after a round without a batch, so that a slow worker is tried again."""
        if self.plan is not None and not self.plan.spans:
            self.batch_time.fade(IDLE_FADE)

    def cache_slice(self, slice_index: int, samples: int, limit: int) -> bool:
        """Record a slice as sent, and drop the oldest beyond `limit` samples; False if the worker has it already."""
        earlier_samples = self.cached_slices.pop(slice_index, None)
        self.cached_slices[slice_index] = samples
        self.cached_samples += samples - (earlier_samples or 0)
        while len(self.cached_slices) > 1 and self.cached_samples > limit:
            oldest = next(iter(self.cached_slices))
            self.cached_samples -= self.cached_slices.pop(oldest)
        return earlier_samples is None


def batch_size(job: Job) -> int:
    """Samples of a batch; in synchronous training evened out, so that each worker has a part in every step."""
    most_samples = job.rounds.max_batch_size
    target = job.rounds.samples_between_updates
    workers = job.num_workers
    if not job.sync.traits.sends_gradients:
        return most_samples
    steps = -(-target // (workers * most_samples))
    return -(-target // (workers * steps))


def has_equal_batches(job: Job) -> bool:
    """Whether all workers get equally many batches regardless of their speeds."""
    return job.run.mode == "replay" or job.sync.traits.sends_gradients or not job.sync.dynamic_local_steps


def makes_up(job: Job) -> bool:
    """Whether rounds have more samples if earlier ones lack some; not if a round is one step or is repeated."""
    return not (job.sync.traits.sends_gradients or job.run.mode == "replay")


def batch_seconds(members: Iterable[WorkerState], equal_batches: bool) -> dict[int, float]:
    """Seconds per batch of each worker: the fleet's median if unknown, or one value for all if `equal_batches`."""
    members = list(members)
    workers = [member.source.worker for member in members]
    if equal_batches:
        return dict.fromkeys(workers, UNKNOWN_BATCH_S)
    return dict(zip(workers, batch_seconds_column(members).tolist(), strict=True))


def batch_seconds_column(members: Sequence[WorkerState]) -> Floats:
    """Seconds per batch of each worker, one row for each: the fleet's median if unknown."""
    seconds = np.array([member.batch_time.mean for member in members], np.float64)  # None becomes NaN.
    is_unknown = np.isnan(seconds)
    if is_unknown.any():
        seconds[is_unknown] = typical_seconds(members)
    return seconds


def typical_seconds(members: Iterable[WorkerState]) -> float:
    """Seconds per batch assumed for a worker without a report: the fleet's median."""
    means = [member.batch_time.mean for member in members if member.batch_time.mean is not None]
    return median(means) if means else UNKNOWN_BATCH_S


def known_batch_s(members: Iterable[WorkerState]) -> dict[int, float]:
    """Seconds per batch of workers for which they are known."""
    seconds: dict[int, float] = {}
    for member in members:
        if member.batch_time.mean is not None:
            seconds[member.source.worker] = member.batch_time.mean
    return seconds


def paces_at_start(members: Sequence[WorkerState], evaluating: bool, equal_batches: bool) -> list[Pace]:
    """Paces of the fleet before a round."""
    seconds = batch_seconds(members, equal_batches)
    paces: list[Pace] = []
    for member in members:
        worker = member.source.worker
        offset_s = 0.0 if equal_batches else member.overhead[evaluating].mean or 0.0
        paces.append(Pace(worker, seconds[worker], member.batch_size, offset_s))
    return paces


def weight(sync: Sync, delta: Delta) -> int:
    """Weight of a delta in the mean: its samples, or the scored positions behind a mean gradient."""
    if sync.weighting == "uniform":
        return 1
    if sync.traits.sends_gradients:
        return delta.scored
    return delta.samples


def with_samples(contribution: Contribution, delta: Delta) -> Contribution:
    """The contribution with the samples of its delta, which may differ from its weight."""
    if contribution.samples == delta.samples:
        return contribution
    return Contribution(contribution.worker, contribution.incarnation, delta.samples, contribution.norm)
