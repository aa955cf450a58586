"""Actors: their names in Ray's lists, and children, which are in the lease of the process that starts them.

Ray ends children with that process.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy


class ListedActor:
    """Actor that Ray's dashboard, lists and logs show by its name and its run, such as ``worker-3 of texts-1``.

    Ray asks for this text once, when the actor has been made. So it has nothing that changes later.
    """

    def __repr__(self) -> str:
        if not ray.is_initialized():
            return super().__repr__()
        context = ray.get_runtime_context()
        name = context.get_actor_name() or type(self).__name__
        return f"{name} of {context.namespace}"


def start_child(cls: type, *arguments: Any) -> Any:
    """Start an actor on this node, in the lease of this process if it has one, with as much as this process has.

    Calls in the concurrency group ``control`` are answered while others compute. Those in the group ``pulse`` wait for
    no other call at all.

    Args:
        cls: class of the actor.
        arguments: arguments of its constructor.

    """
    context = ray.get_runtime_context()
    group = get_current_placement_group()
    if group is None:
        strategy: Any = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
    else:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    leased_amounts = context.get_assigned_resources() if context.get_actor_id() else {}
    amounts = {
        "num_cpus": leased_amounts.get("CPU", 0),
        "num_gpus": leased_amounts.get("GPU", 0),
        "memory": leased_amounts.get("memory"),
    }
    groups = {"control": 1, "pulse": 1}
    actor_class = ray.remote(concurrency_groups=groups, max_restarts=0, max_task_retries=0)(cls)
    return actor_class.options(scheduling_strategy=strategy, **amounts).remote(*arguments)


def own_cores() -> int:
    """Number of threads that an actor should compute with: its CPUs, and at least one."""
    leased_amounts = ray.get_runtime_context().get_assigned_resources()
    return max(1, int(leased_amounts.get("CPU", 0)))


def own_gpus() -> float:
    """GPUs that an actor has leased, of which it may have a part."""
    leased_amounts = ray.get_runtime_context().get_assigned_resources()
    return float(leased_amounts.get("GPU", 0))
