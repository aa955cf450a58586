"""Cleanup of what an earlier driver or scheduler of a run has left in the cluster: named actors, and leases."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

import ray
from ray._private.state import state
from ray.util import list_named_actors

from hypha_ray.errors import ClusterError
from hypha_ray.market.allocator import reclaim

DEADLINE_S = 15.0
"""Longest wait for what is left over to be gone. Ray needs 5 s to end a process that is stopped."""
_POLL_S = 0.05


def end_leftovers(run: str, deadline_s: float = DEADLINE_S, but: Container[str] = ()) -> None:
    """End whatever bears this run's name, and wait until it is gone, `deadline_s` seconds at most.

    Actors and leases of the names in `but` are left. Actors of a driver that is still alive are none of ours to end:
    it has a run of the same name in another directory.

    Raises:
        ClusterError: there is such a driver, or something doesn't end.

    """
    deadline = time.monotonic() + deadline_s
    if not _poll(lambda: not _foreign(run), deadline):
        fix = "choose another run.name, or wait until it has ended"
        raise ClusterError("NET006", f"another driver in this cluster has a run {run!r}", got=_foreign(run), fix=fix)
    reclaim(run, but)  # Leases first: it takes a stopped process along in no time.
    if not _poll(lambda: _ended(run, but), deadline):
        left = ", ".join(name for name in _names(run) if name not in but) or "leases"
        raise ClusterError("NET007", f"what is left of run {run!r} doesn't end", got=left, fix="submit the job again")


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _ended(run: str, but: Container[str]) -> bool:
    """Whether nothing else is left; what is left is told to end, again if need be."""
    names = [name for name in _names(run) if name not in but]
    for name in names:
        actor = _actor(run, name)
        if actor is not None:
            ray.kill(actor)
    return not names and reclaim(run, but) == 0


def _foreign(run: str) -> str:
    """The address of a driver other than this one that is alive and owns actors of the run; or nothing."""
    here = ray.get_runtime_context().get_job_id()
    drivers = {job["JobID"]: job for job in state.job_table() if not job["IsDead"] and job["JobID"] != here}
    actors = filter(None, (_actor(run, name) for name in _names(run)))
    owners = {actor._actor_id.job_id.hex() for actor in actors}
    return ", ".join(
        f"pid {drivers[job]['DriverPid']} on {drivers[job]['DriverIPAddress']}" for job in owners & set(drivers)
    )


def _names(run: str) -> list[str]:
    return [row["name"] for row in list_named_actors(all_namespaces=True) if row["namespace"] == run]


def _actor(run: str, name: str) -> ray.actor.ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=run)
    except (ValueError, AssertionError):  # Ray asserts that it finds the class, which goes with a dead driver.
        return None  # It has ended meanwhile, or is about to.
