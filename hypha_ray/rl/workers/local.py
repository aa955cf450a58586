"""Model workers of the island's own process: a request is a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from hypha_ray.rl.dataflow.master import Master
from hypha_ray.rl.dataflow.mesh import Mesh
from hypha_ray.rl.dataflow.plan import Shard
from hypha_ray.rl.dataflow.post import Post
from hypha_ray.rl.dataflow.requests import Reply, Request, Transfer
from hypha_ray.rl.dataflow.sample import Sample
from hypha_ray.rl.roles.role import Role
from hypha_ray.rl.workers.model_worker import ModelWorker


class Local:
    """Transport by calls.

    Args:
        workers: model workers by their numbers.

    """

    def __init__(self, workers: Mapping[int, ModelWorker]) -> None:
        self._workers = dict(workers)
        self._numbers = count()
        self._made: dict[Shard, Sample] = {}
        self._replies: dict[int, Reply] = {}

    def send(self, request: Request) -> int:
        """Handle a request at once; return a number for its reply."""
        shards = [self._made[shard] for hook in request.before if isinstance(hook, Transfer) for shard in hook.shards]
        made, reply = self._workers[request.worker].handle(request, *shards)
        if made is not None:
            self._made[Shard(request.worker, request.number)] = made
        if request.name == "clear_data_cache":
            gone = set(request.ids)
            self._made = {shard: one for shard, one in self._made.items() if not gone.issuperset(one.ids)}
        self._replies[number := next(self._numbers)] = reply
        return number

    def receive(self, replies: Sequence[int], deadline_s: float) -> tuple[int, Reply]:
        """Return the first reply: all are there."""
        return replies[0], self._replies.pop(replies[0])

    def revive(self) -> tuple[int, ...]:
        """Do nothing: workers of this process die with it."""
        return ()

    def close(self) -> None:
        """Do nothing: only memory is held."""


def master_of(roles: Mapping[str, Role]) -> Master[int]:
    """Return a master with one model worker, which plays all roles and trains none."""
    meshes = {name: Mesh((0,)) for name in roles}
    return Master(meshes, Post(Local({0: ModelWorker(0, roles, {})}), deadline_s=0.0), count())
