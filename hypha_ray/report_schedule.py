"""Times at which a worker reports its progress in a round.

A report in the middle of a round can be corrected later, one near its end can't. So intervals are even at first, and
halve the rest of the plan at its end.
"""

from __future__ import annotations

from hypha_ray.config.schema import Job
from hypha_ray.types.data import record

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

    def due(self, seconds: float, batches: float, remaining: float) -> bool:
        """Whether a report is due.

        Args:
            seconds: time since the last report.
            batches: number of batches since then.
            remaining: number of batches up to the end of the plan.

        """
        if seconds >= self.every_s:
            return True
        return self.halves_rest and seconds >= LEAST_PART * self.every_s and 2 * batches >= remaining
