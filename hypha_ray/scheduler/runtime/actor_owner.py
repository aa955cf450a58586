"""The owner of the actors that outlive a scheduler: Ray ends an actor with the process that started it.

    driver ──owns──► owner ──owns──► workers, parameter servers        They end with the driver, not with a scheduler.
       └────owns──► scheduler ──owns──► store, data shards, telemetry

The owner only starts actors and keeps their handles. Ray restarts it if it dies.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from hypha_ray.server.actor import GROUPS, ParameterServer
from hypha_ray.worker.actor import BridgedWorker, TrainWorker

OWNER = "owner"
"""Name of the owner in the namespace of the run."""
_WORKER = {"concurrency_groups": {"control": 1}, "allow_out_of_order_execution": True}
ROLES = {
    "train": ray.remote(**_WORKER)(TrainWorker),
    "bridged": ray.remote(**_WORKER)(BridgedWorker),
    "server": ray.remote(concurrency_groups=GROUPS, allow_out_of_order_execution=True)(ParameterServer),
}
"""Actor classes by the kind of a worker, and of a server, with the concurrency groups that their methods need."""


class ActorOwner:
    """Starts actors and keeps their handles."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}
        """Latest actor of each name; Ray ends an actor whose last handle is gone."""

    def ping(self) -> int:
        """Return the process id, as a sign of life."""
        return os.getpid()

    def start(self, role: str, options: dict[str, Any], *arguments: Any) -> Any:
        """Start an actor under the name in its options; return its handle.

        Args:
            role: ``server``, or the kind of a worker: ``train``, or ``bridged`` if its trainer runs outside Ray.
            options: Ray options of the actor.
            arguments: arguments of its constructor; small, because Ray keeps them as long as the actor.

        Raises:
            ValueError: the name is taken.

        """
        actor = ROLES[role].options(**options).remote(*arguments)
        self._held[options["name"]] = actor
        return actor
