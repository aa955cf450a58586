"""Bytes of weights on their way to workers."""

from __future__ import annotations

from hypha_ray.config import Job
from hypha_ray.exchange_schedule import fragments_of_round
from hypha_ray.scheduler.fleet.worker_state import WorkerState
from hypha_ray.scheduler.rounds.round import CommittedRound
from hypha_ray.types import WeightsVersion


def received_bytes(
    job: Job,
    weight_bytes: tuple[int, tuple[int, ...]],
    done: CommittedRound,
    member: WorkerState,
    version: WeightsVersion,
) -> int:
    """Bytes received for a round's result that a worker has merged.

    Args:
        job: the job file.
        weight_bytes: bytes of all weights, and of each fragment.
        done: the round.
        member: the worker.
        version: version of the weights that the worker has merged now.

    """
    every, parts = weight_bytes
    if member.full_version == version:
        return every if done.number == version - 1 else 0
    return done.coded_bytes or sum(parts[n] for n in fragments_of_round(job, done.number))
