"""Nodes of the cluster, with the terms that their owners have posted, and speeds that runs have measured there.

Both are in the key-value store of Ray's control service. Posted terms stand in for labels of the same names, which a
running node can't change. An entry of a node that is gone is never read: a new node has a new id.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray._private.worker import global_worker
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.config.folders import with_absolute_folders
from hypha_ray.market.requirements import NodeResources
from hypha_ray.market.speeds import UNKNOWN, Speeds, training_key

NAMESPACE = b"hypha_ray"
PREFIX = b"terms/"
SPEEDS = "speeds"


def cluster_nodes(leased: Mapping[str, Mapping[str, float]] | None = None) -> list[NodeResources]:
    """The nodes that are alive, and what is free on them at this moment.

    Args:
        leased: amounts by node id that are to be counted as free.

    """
    free = available_resources_per_node()
    leased = leased or {}
    posted = posted_labels()
    return [
        NodeResources(
            node["NodeManagerAddress"],
            node["Resources"],
            Counter(free.get(node["NodeID"], {})) + Counter(leased.get(node["NodeID"], {})),
            {**node["Labels"], **posted.get(node["NodeID"], {})},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def draining_nodes() -> frozenset[str]:
    """Ids of nodes that Ray is about to take away, such as spot machines with notice."""
    return frozenset(state.get_draining_nodes())


def own_node() -> str:
    """Ray's id of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def on_this_node() -> dict[str, Any]:
    """Options that place an actor on the node of this process, where it reserves nothing."""
    node = NodeAffinitySchedulingStrategy(own_node(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": node}


def posted_labels() -> dict[str, dict[str, str]]:
    """Labels by node id, as posted."""
    return _entries(PREFIX)


def post_labels(node: str, labels: Mapping[str, str]) -> None:
    """Post terms of a node in the place of those posted before."""
    _put(PREFIX + node.encode(), dict(labels))


def posted_speeds(training: str) -> Speeds:
    """Speeds that runs of a training have measured; see `training_key`."""
    return Speeds(_entries(f"{SPEEDS}/{training}/".encode()))


def speeds_of(job: Job, shapes: Mapping[str, Sequence[int]]) -> Speeds:
    """Speeds of a job's workers on samples of these shapes, if its strategy asks for them."""
    if job.resources.strategy != "value":
        return UNKNOWN
    return posted_speeds(training_key(with_absolute_folders(job), shapes))


def post_speeds(training: str, speeds: Mapping[str, float]) -> None:
    """Post samples per second by place, in the place of those posted before."""
    for place, speed in speeds.items():
        _put(f"{SPEEDS}/{training}/{place}".encode(), speed)


def _entries(prefix: bytes) -> dict[str, Any]:
    """Entries whose keys begin like this, by the rest of the key."""
    client = global_worker.gcs_client
    keys = client.internal_kv_keys(prefix, NAMESPACE)
    values = client.internal_kv_multi_get(keys, NAMESPACE) if keys else {}
    return {key.removeprefix(prefix).decode(): json.loads(value) for key, value in values.items()}


def _put(key: bytes, value: object) -> None:
    global_worker.gcs_client.internal_kv_put(key, json.dumps(value).encode(), True, NAMESPACE)
