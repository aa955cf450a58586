"""Cleanup of named actors and leases that an earlier driver or scheduler of a run has left in the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

import ray
from ray._private.state import state
from ray.util import list_named_actors

from hypha_ray.errors import ClusterError
from hypha_ray.market.groups import reclaim

DEADLINE_S = 15.0
"""Longest wait for the cleanup, in seconds. Ray needs 5 s to end a stopped process."""
_POLL_S = 0.05


def end_leftovers(run: str, deadline_s: float = DEADLINE_S, but: Container[str] = ()) -> None:
    """End all actors and leases of a run, and wait for that, at most `deadline_s` seconds.

    Those named in `but` stay. Actors of a live driver stay, too, because it has a run of the same name in another
    directory.

    Raises:
        ClusterError: there is such a driver, or an actor doesn't end.

    """
    deadline = time.monotonic() + deadline_s
    if not _poll(lambda: not _foreign(run), deadline):
        fix = "choose another run.name, or wait until it has ended"
        raise ClusterError("NET006", f"another driver in this cluster has a run {run!r}", got=_foreign(run), fix=fix)
    reclaim(run, but)  # Leases first: the end of its lease ends a stopped process at once.
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
    """Whether nothing is left; ends what is, again if need be."""
    names = [name for name in _names(run) if name not in but]
    for name in names:
        actor = _actor(run, name)
        if actor is not None:
            ray.kill(actor)
    return not names and reclaim(run, but) == 0


def _foreign(run: str) -> str:
    """Address of another live driver that owns actors of the run; empty without one."""
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
        return None  # It has ended, or is about to.
