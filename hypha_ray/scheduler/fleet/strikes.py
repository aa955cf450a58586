"""Strikes against workers whose deltas are rejected for their content."""

from __future__ import annotations

from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.messages import Outbox
from hypha_ray.types import Source, Verdict


def strike(roster: Roster, out: Outbox, verdict: Verdict, now: float) -> list[Source]:
    """Count strikes for a verdict's rejections; return the workers that are excluded."""
    excluded = [one.worker for one in verdict.rejected if one.blamed and roster.strike(one.worker)]
    for worker in excluded:
        out.event("exclude", now, worker=worker, strikes=roster.most_strikes)
    return [source for worker in excluded if (source := roster.slots[worker].source) is not None]
