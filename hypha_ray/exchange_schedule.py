"""Schedule of the exchange: the fragments that a round exchanges, and the version of the weights that is due in it.

Fragments take turns, so that less is on the wire at one time (Streaming DiLoCo, arXiv 2501.18512, section 2).
"""

from __future__ import annotations

import math

from hypha_ray.config.schema import Job
from hypha_ray.types import WeightsVersion

SETTLING = 5.0
"""Outer steps until momentum has 99 % of its final sum, in units of 1 / (1 − μ)."""


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
