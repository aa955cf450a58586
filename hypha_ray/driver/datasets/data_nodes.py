"""Data nodes as their owners handle them: serve a dataset, list what is served, check it, withdraw it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config.value_types import CLUSTER, is_malformed, malformed
from hypha_ray.data.actor import NODE_GROUPS, READS_AT_ONCE, DataNode
from hypha_ray.data.storage.url_folder import is_url, name_of
from hypha_ray.errors import ConfigError, HyphaError
from hypha_ray.scheduler.runtime.slices.data_nodes import (
    LostReplica,
    Replica,
    actor_name,
    described,
    look_up,
    names,
    require_equal,
    unknown,
)


def serve(place: str, name: str | None, node: str | None) -> Replica:
    """Start a data node, which outlives this process.

    Args:
        place: folder of a prepared dataset on the data node's machine, or URL.
        name: name by which jobs ask for the dataset; None: that of the folder.
        node: address, or first characters of the id, of a node in the cluster; None: this machine.

    Raises:
        ConfigError: a name can't be used, is in use on that node, or no node is meant.
        DataError: the folder contains no dataset, or other samples than data nodes of that name.

    """
    if is_malformed(place):
        raise malformed(place)
    if node is None and not is_url(place):
        place = str(Path(place).expanduser().absolute())
    name = _checked(name or name_of(place))
    node_id = ray.get_runtime_context().get_node_id() if node is None else _node_id(node)
    full = actor_name(name, node_id)
    if full in names().get(name, ()):
        fix = f"withdraw it by `python jobs/data.py --withdraw {name}`, or choose another --name"
        raise ConfigError("DATA042", f"this node serves a dataset {name!r} already", full, fix=fix)
    options = {"max_restarts": -1, "max_concurrency": READS_AT_ONCE, "num_cpus": 0, "lifetime": "detached"}
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    actor = ray.remote(concurrency_groups=NODE_GROUPS)(DataNode)
    started = actor.options(name=full, namespace=CLUSTER, scheduling_strategy=where, **options).remote(place)
    try:
        replica = described(full)
        others, _ = look_up(name)
        require_equal(name, [replica, *(other for other in others if other.name != full)])
    except HyphaError:
        ray.kill(started)
        raise
    return replica


def served() -> dict[str, tuple[list[Replica], list[LostReplica]]]:
    """All data nodes of the cluster, by dataset: those that answer, and those that don't."""
    return {name: look_up(name) for name in names()}


def withdraw(name: str, node: str | None) -> list[str]:
    """End the data nodes of a dataset, or only that on one node; return their names in Ray.

    Raises:
        DataError: there is none.

    """
    known = names()
    suffix = "" if node is None else f"/{_node_id(node)[:8]}"
    ended = [full for full in known.get(name, ()) if full.endswith(suffix)]
    if not ended:
        raise unknown(name, known)
    for full in ended:
        ray.kill(ray.get_actor(full, namespace=CLUSTER))
    return ended


def problems(replicas: Sequence[Replica]) -> dict[str, list[str]]:
    """Problems of each data node, by its name in Ray, after all of its slices have been read where they lie."""
    found: list[list[str]] = ray.get([replica.actor.check.remote() for replica in replicas])
    return {replica.name: problems for replica, problems in zip(replicas, found, strict=True)}


def _checked(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        allowed = "up to 100 letters, digits, dots, underscores or hyphens, with a letter or digit first"
        raise ConfigError("CFG003", "a dataset can't be served under this name", name, allowed, "choose a --name")
    return name


def _node_id(node: str) -> str:
    """Id of the live node that is meant by an address or the beginning of an id."""
    nodes: list[dict[str, Any]] = [one for one in ray.nodes() if one["Alive"]]
    meant = [
        one["NodeID"] for one in nodes if node and (one["NodeID"].startswith(node) or one["NodeManagerAddress"] == node)
    ]
    if len(meant) != 1:
        allowed = ", ".join(f"{one['NodeManagerAddress']} ({one['NodeID'][:8]})" for one in nodes)
        what = "--node means several nodes" if meant else "--node means no node of the cluster"
        raise ConfigError("CFG003", what, node, allowed, "give the first characters of its id")
    return str(meant[0])
