"""Children: actors in the lease of the process that starts them. Ray ends them with it."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy


def start_child(cls: type, *arguments: Any) -> Any:
    """Start an actor on this node, in the lease of this process if it has one, with as much as this process has.

    Calls that need nothing else are answered beside those that compute: they are in the group ``control``. Those in the
    group ``pulse`` wait for no other call at all.

    Args:
        cls: class of the actor.
        arguments: arguments of its constructor.

    """
    context = ray.get_runtime_context()
    group = get_current_placement_group()
    place = (
        NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        if group is None
        else PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    )
    own = context.get_assigned_resources() if context.get_actor_id() else {}
    amounts = {"num_cpus": own.get("CPU", 0), "num_gpus": own.get("GPU", 0), "memory": own.get("memory")}
    kind = ray.remote(concurrency_groups={"control": 1, "pulse": 1}, max_restarts=0, max_task_retries=0)(cls)
    return kind.options(scheduling_strategy=place, **amounts).remote(*arguments)


def own_cores() -> int:
    """Number of threads that an actor should compute with: its CPUs, and at least one."""
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0)))


def own_gpus() -> float:
    """GPUs that an actor has leased, of which it may have a part."""
    return float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0))
