"""The owner of the actors that outlive a scheduler: Ray ends an actor with the process that started it.

    driver ──owns──► owner ──owns──► workers, parameter servers        They end with the driver, not with a scheduler.
       └────owns──► scheduler ──owns──► store, data shards, telemetry

The owner only starts actors and keeps their handles. Ray restarts it if it dies.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import ray

from hypha_ray.children import ListedActor
from hypha_ray.server.actor import GROUPS, ParameterServer
from hypha_ray.worker.actor import BridgedWorker, TrainWorker

OWNER = "owner"
"""Name of the owner in the namespace of the run."""


@cache
def actor_class(role: str) -> Any:
    """Actor class of a server, or of a kind of worker, with the concurrency groups that its methods need.

    Ray draws a random id for it, so it isn't made as this module is loaded: processes may be forked afterwards.

    Args:
        role: ``server``, or the kind of a worker: ``train``, or ``bridged`` if its trainer runs outside Ray.

    """
    if role == "server":
        return ray.remote(concurrency_groups=GROUPS, allow_out_of_order_execution=True)(ParameterServer)
    worker = {"train": TrainWorker, "bridged": BridgedWorker}[role]
    return ray.remote(concurrency_groups={"control": 1}, allow_out_of_order_execution=True)(worker)


class ActorOwner(ListedActor):
    """Starts actors and keeps their handles."""

    def __init__(self) -> None:
        self._actor_by_name: dict[str, Any] = {}
        """Latest actor of each name; Ray ends an actor whose last handle is gone."""

    def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    def start(self, role: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Start an actor under the name in its options; return its handle.

        Args:
            role: as `actor_class` takes it.
            options: Ray options of the actor.
            arguments: arguments of its constructor; small, because Ray keeps them as long as the actor.

        Raises:
            ValueError: the name is taken.

        """
        actor = actor_class(role).options(**options).remote(*arguments)
        self._actor_by_name[options["name"]] = actor
        return actor
