"""Schedules that workers share with the scheduler: of the fragments and weights that a round exchanges, and of reports.

Fragments take turns, so that less is on the wire at one time (Streaming DiLoCo, arXiv 2501.18512, section 2). A report
in the middle of a round can be corrected later, one near its end can't. So intervals of reports are even at first, and
halve the rest of the plan at its end.
"""

from __future__ import annotations

import math

from hypha_ray.config.schema import Job
from hypha_ray.types import WeightsVersion
from hypha_ray.types.data import record

SETTLING = 5.0
"""Outer steps until momentum has 99 % of its final sum, in units of 1 / (1 − μ)."""
SMALL_FLEET = 64
"""Largest number of workers whose plans are corrected at every report."""
LEAST_PART = 0.1
"""Shortest time between two reports, as a part of the usual one."""


@record(frozen=True, slots=True)
class ReportSchedule:
    """Intervals between two reports of a worker."""

    every_s: float
    """Longest time between two reports, up to the end of a batch."""
    halves_rest: bool = False
    """Whether reports come sooner at the end of a plan, since they can still change it."""

    @classmethod
    def of(cls, job: Job) -> ReportSchedule:
        """Schedule of a job's workers."""
        sync = job.sync
        adapts = sync.dynamic_local_steps and sync.traits.has_barrier and not sync.traits.sends_gradients
        is_fixed = job.run.mode == "replay"
        return cls(job.report_interval_s, adapts and not is_fixed and job.num_workers <= SMALL_FLEET)

    def due(self, seconds: float, batches: float, remaining_batches: float) -> bool:
        """Whether a report is due.

        Args:
            seconds: time since the last report.
            batches: number of batches since then.
            remaining_batches: number of batches up to the end of the plan.

        """
        if seconds >= self.every_s:
            return True
        return self.halves_rest and seconds >= LEAST_PART * self.every_s and 2 * batches >= remaining_batches


def is_last_round(job: Job, round: int) -> bool:
    """Whether a round is the last one by the job file; a run that ends early has none."""
    return round >= job.rounds.update_rounds - 1


def fragments_of_round(job: Job, round: int) -> tuple[int, ...]:
    """Fragments that a round exchanges: one, in turn; all of them in the last round and while the run warms up."""
    fragments = job.sync.fragments
    if not job.sync.staggered or round < job.rounds.warmup_rounds or is_last_round(job, round):
        return tuple(range(fragments))
    return (round % fragments,)


def version_due(job: Job, round: int) -> WeightsVersion:
    """Version of the weights that a worker must have merged in a round before it hands over.

    With several exchanges under way, the version is older than the round. The warm-up and the last round begin with the
    newest weights.
    """
    warmup = job.rounds.warmup_rounds
    behind = job.sync.in_flight - 1
    if round <= warmup or is_last_round(job, round):
        return WeightsVersion(round)
    return WeightsVersion(max(warmup, round - behind))


def outer_steps_before(job: Job, round: int, fragment: int) -> int:
    """Outer steps that a fragment has made before a round; plain averages of the warm-up don't count."""
    warmup = job.rounds.warmup_rounds
    fragments = job.sync.fragments
    if not job.sync.staggered:
        return max(0, round - warmup)
    first_exchange = warmup + (fragment - warmup) % fragments
    return len(range(first_exchange, round, fragments))


def settled_momentum(steps: int) -> float:
    """Largest outer momentum that settles within so many outer steps, rounded down to hundredths; 0 if none does."""
    if steps <= SETTLING:
        return 0.0
    return math.floor(100 * (1 - SETTLING / steps)) / 100
