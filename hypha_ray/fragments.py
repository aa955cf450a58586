"""Which parts of the weights a round exchanges, and how they travel to a worker.

The parts take turns, so that what is on the wire at one time is less (Streaming DiLoCo, arXiv 2501.18512, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from hypha_ray.config.schema import Job


@dataclass(frozen=True, slots=True)
class Piece:
    """One fragment of the weights with which a round starts.

    Args:
        round: number of the round.
        fragment: which one.
        of: how many pieces a worker is sent of this round's weights.
        whole: they are all there are, for a worker that drops its own; or else it lacks just these.
        difference: what comes is the coded difference to the fragment's weights before.

    """

    round: int
    fragment: int
    of: int = 1
    whole: bool = True
    difference: bool = False


def exchanged(job: Job, round: int) -> tuple[int, ...]:
    """Fragments that a round exchanges: one, in turn; all of them in the last round and while the run warms up."""
    every = range(job.sync.fragments)
    if not job.sync.staggered or round < job.rounds.warmup_rounds or round >= job.rounds.update_rounds - 1:
        return tuple(every)
    return (every[round % len(every)],)


def due(job: Job, round: int) -> int:
    """Number of the weights that a worker has to have in a round before it hands over; round n begins number n.

    With several exchanges under way they are older than the round. Warm-up and last round begin with the newest.
    """
    warmup, behind = job.rounds.warmup_rounds, job.sync.in_flight - 1
    if round <= warmup or round >= job.rounds.update_rounds - 1:
        return round
    return max(warmup, round - behind)


def turn(job: Job, round: int, fragment: int) -> int:
    """Outer steps that a fragment has made before a round; plain averages of the warm-up don't count."""
    warmup, fragments = job.rounds.warmup_rounds, job.sync.fragments
    if not job.sync.staggered:
        return max(0, round - warmup)
    return len(range(warmup + (fragment - warmup) % fragments, round, fragments))
