"""The course that a job's strategy asks for."""

from __future__ import annotations

from collections.abc import Sequence

from hypha_ray.config import Job
from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.scheduler.planning.async_planner import Turns
from hypha_ray.scheduler.planning.round_planner import Assigner, Sizes
from hypha_ray.scheduler.resume_point import Past
from hypha_ray.scheduler.strategies.asynchronous import Arrivals
from hypha_ray.scheduler.strategies.barrier import Course
from hypha_ray.scheduler.strategies.overlapped import Flights
from hypha_ray.types import SliceInfo


def course_of(job: Job, slices: Sequence[SliceInfo], sizes: Sizes, past: Past, roster: Roster, out: Outbox) -> Course:
    """Rounds with a barrier at their end, several of them under way, or deltas that are merged as they come."""
    if job.sync.strategy == "async":
        return Arrivals(job, past, roster, Turns(job, slices, sizes, past), out)
    if job.sync.in_flight > 1:
        return Flights(job, past, roster, Assigner(job, slices, sizes, past), out)
    return Course(job, past, roster, Assigner(job, slices, sizes, past), out)
