"""Strategies of rounds, with a barrier and without, and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.async_planner import AsyncPlanner
from hypha_ray.scheduler.planning.round_planner import RoundPlanner
from hypha_ray.scheduler.planning.worker_plans import Sizes
from hypha_ray.scheduler.resume_point import ResumePoint
from hypha_ray.scheduler.strategies.asynchronous import AsyncRounds
from hypha_ray.scheduler.strategies.barrier import BarrierRounds
from hypha_ray.types import SliceInfo


def strategy_of(
    job: Job, slices: Sequence[SliceInfo], sizes: Sizes, past: ResumePoint, roster: Roster, out: Outbox
) -> BarrierRounds | AsyncRounds:
    """Create the strategy of a job: rounds with a barrier, or deltas merged as they arrive."""
    if not job.sync.traits.has_barrier:
        return AsyncRounds(job, past, roster, AsyncPlanner(job, slices, sizes, past), out)
    return BarrierRounds(job, past, roster, RoundPlanner(job, slices, sizes, past), out)
