"""Islands of one model worker in the process of its master, and their validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypha_ray.rl.dataflow.master import Extras, Master
from hypha_ray.rl.dataflow.mesh import Mesh
from hypha_ray.rl.dataflow.post import Post
from hypha_ray.rl.dataflow.requests import Reply
from hypha_ray.rl.graphs import validation_graph
from hypha_ray.rl.packing import sample_of
from hypha_ray.rl.roles.role import Role
from hypha_ray.rl.workers.local import Local
from hypha_ray.rl.workers.model_worker import ModelWorker
from hypha_ray.types import Samples, Sums, added


def master_of(roles: Mapping[str, Role], **spec: Any) -> Master[int]:
    """Return a master with one model worker, which plays all roles."""
    meshes = {name: Mesh((0,)) for name in roles}
    return Master(meshes, Post(Local({0: ModelWorker(0, roles, spec)}), deadline_s=0.0))


def validate(master: Master[Any], batches: Iterable[Samples]) -> Sums:
    """Return reward, pass@1 and length of responses, which are sampled with the same random numbers each time."""
    graph = validation_graph()
    extras = {call.name: Extras({"evaluation": True}) for call in graph.calls}
    return added(sums_of(master.traverse(graph, sample_of(batch), extras)) for batch in batches)


def sums_of(replies: Mapping[str, Sequence[Reply]]) -> Sums:
    """Return the figures of all replies."""
    return added(reply.sums for each in replies.values() for reply in each)
