"""Keys that exclude rounds which grow (`rounds.max_exchange_share`).

Such a run has fewer rounds than its workers, servers and store expect. So whatever depends on the number of the last
round is excluded.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypha_ray.config.conflicts import Conflict
from hypha_ray.config.schema import Job

KEY = "rounds.max_exchange_share"


def growth_conflicts(job: Job) -> Iterator[Conflict]:
    """All conflicts of a job whose rounds grow; none if they don't."""
    if job.rounds.max_exchange_share is None:
        return
    sync = job.sync
    if job.run.mode == "replay":
        yield Conflict(KEY, "run.mode", "times of exchanges aren't reproducible: choose elastic")
    if job.rl.algorithm is not None:
        yield Conflict(KEY, "rl.algorithm", "responses are of the weights that their round begins with: leave it out")
    if not sync.traits.own_weights:
        yield Conflict(KEY, "sync.strategy", "only DiLoCo has long rounds: choose diloco")
    if job.rounds.epochs is None:
        fix = "give rounds.epochs in place of update_rounds: the same samples take fewer rounds then"
        yield Conflict(KEY, "rounds.update_rounds", fix)
    if sync.staggered:
        yield Conflict(KEY, "sync.fragments", "the last round isn't known before: set sync.stagger = false")
    if sync.in_flight > 1:
        yield Conflict(KEY, "sync.in_flight", "the last round isn't known before: choose 1")
    if job.outer_optimizer.schedule != "constant":
        yield Conflict(KEY, "outer_optimizer.schedule", "the number of rounds isn't known before: choose constant")
