"""Data nodes as their owners handle them: serve a dataset, list what is served, check it, withdraw it.

A dataset may be prepared in parts, each on a node of the cluster, which serves it from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config.value_types import CLUSTER, is_malformed, malformed
from hypha_ray.data.actor import NODE_GROUPS, READS_AT_ONCE, DataNode
from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.prepare import prepare
from hypha_ray.data.url_folder import is_url, name_of
from hypha_ray.errors import CapacityError, ClusterError, ConfigError, HyphaError
from hypha_ray.scheduler.runtime.data_nodes import (
    LostReplica,
    Replica,
    actor_name,
    described,
    look_up,
    names,
    require_equal,
    unknown,
)
from hypha_ray.scheduler.runtime.supervised_actor import death_text


def serve(location: str, name: str | None, node: str | None) -> Replica:
    """Start a data node, which outlives this process.

    Args:
        location: folder of a prepared dataset on the data node's machine, or URL.
        name: name by which jobs ask for the dataset; None: that of the folder.
        node: address, or first characters of the id, of a node in the cluster; None: this machine.

    Raises:
        ConfigError: the name can't be used or is in use on that node, or `node` fits no single node.
        DataError: the folder contains no dataset, or other samples than data nodes of that name.

    """
    if is_malformed(location):
        raise malformed(location)
    if node is None and not is_url(location):
        location = str(Path(location).expanduser().absolute())
    name = _require_name(name or name_of(location))
    node_id = ray.get_runtime_context().get_node_id() if node is None else _node_id(node)
    full_name = actor_name(name, node_id)
    if full_name in names().get(name, ()):
        fix = f"withdraw it by `python jobs/data.py --withdraw {name}`, or choose another --name"
        raise ConfigError("DATA042", f"this node serves a dataset {name!r} already", full_name, fix=fix)
    actor_class = ray.remote(concurrency_groups=NODE_GROUPS)(DataNode).options(
        name=full_name,
        namespace=CLUSTER,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        max_restarts=-1,
        max_concurrency=READS_AT_ONCE,
        num_cpus=0,
        lifetime="detached",
    )
    actor = actor_class.remote(location)
    try:
        replica = described(full_name)
        replicas, _ = look_up(name)
        earlier_replicas = [earlier for earlier in replicas if earlier.name != full_name]
        require_equal(name, [replica, *earlier_replicas])
    except HyphaError:
        ray.kill(actor)
        raise
    return replica


def served() -> dict[str, tuple[list[Replica], list[LostReplica]]]:
    """All data nodes of the cluster, by dataset: live replicas, and lost ones."""
    return {name: look_up(name) for name in names()}


def withdraw(name: str, node: str | None) -> list[str]:
    """End the data nodes of a dataset, or only that on one node; return their names in Ray.

    Raises:
        DataError: there is none.

    """
    actors_by_dataset = names()
    suffix = "" if node is None else f"/{_node_id(node)[:8]}"
    withdrawn = [actor for actor in actors_by_dataset.get(name, ()) if actor.endswith(suffix)]
    if not withdrawn:
        raise unknown(name, actors_by_dataset)
    for actor in withdrawn:
        ray.kill(ray.get_actor(actor, namespace=CLUSTER))
    return withdrawn


def problems(replicas: Sequence[Replica]) -> dict[str, list[str]]:
    """Problems of each data node, by its name in Ray, after it has read all of its slices."""
    checks = {replica.name: replica.actor.check.remote() for replica in replicas}
    results: list[list[str]] = ray.get(list(checks.values()))
    return dict(zip(checks, results, strict=True))


def _require_name(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        allowed = "up to 100 letters, digits, dots, underscores or hyphens, with a letter or digit first"
        raise ConfigError("CFG003", "a dataset can't be served under this name", name, allowed, "choose a --name")
    return name


def _node_id(node: str) -> str:
    """Id of the live node with an address or the beginning of an id."""
    matches: list[str] = []
    listed = []
    for entry in ray.nodes():
        if not entry["Alive"]:
            continue
        node_id = entry["NodeID"]
        address = entry["NodeManagerAddress"]
        listed.append(f"{address} ({node_id[:8]})")
        if node and (node_id.startswith(node) or address == node):
            matches.append(node_id)
    if len(matches) != 1:
        allowed = ", ".join(listed)
        problem = "--node means several nodes" if matches else "--node means no node of the cluster"
        raise ConfigError("CFG003", problem, node, allowed, "give the first characters of its id")
    return matches[0]


def prepare_on_nodes(options: PrepareOptions) -> list[Replica]:
    """Prepare `options.nodes` parts at the same time, and serve them under one name.

    Part i is left in the folder ``part-<i>`` of `options.out` on its node. The source has to be readable on all nodes.

    Raises:
        CapacityError: the cluster has fewer nodes.
        ClusterError: a node was lost meanwhile.
        HyphaError: see `prepare`.

    """
    options.check()
    count = int(options.nodes or 1)
    live_nodes = [node for node in ray.nodes() if node["Alive"]]
    if len(live_nodes) < count:
        fix = "start more nodes, or give a smaller --nodes"
        problem = "the cluster has fewer nodes than --nodes"
        raise CapacityError("CFG004", problem, f"{len(live_nodes)}", f"{count}", fix)
    node_ids = [node["NodeID"] for node in sorted(live_nodes, key=_cpus_first)[:count]]
    folder = options.out
    if not folder.startswith("~"):
        folder = str(Path(folder).absolute())
    name = options.name or name_of(folder)
    part_folders = [f"{folder}/part-{number}" for number in range(count)]
    tasks = []
    for number, (node_id, part_folder) in enumerate(zip(node_ids, part_folders, strict=True)):
        part_options = replace(options, out=part_folder, part=f"{number}/{count}", nodes=None, name=None)
        on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(num_cpus=0, scheduling_strategy=on_node, max_retries=0)(_prepare)
        tasks.append(task.remote(part_options))
    try:
        ray.get(tasks)
    except RayTaskError:
        raise  # The error of the preparation itself.
    except RayError as error:
        fix = "give the same command again: each part is prepared anew"
        raise ClusterError("NET014", "a part isn't prepared", death_text(error), fix=fix) from None
    return [serve(part_folder, name, node_id) for node_id, part_folder in zip(node_ids, part_folders, strict=True)]


def _prepare(options: PrepareOptions) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    prepare(options, lambda phase, number: None, now)


def _cpus_first(node: dict[str, Any]) -> tuple[bool, str]:
    """Sort key by which nodes with CPUs come first."""
    return not node["Resources"].get("CPU"), node["NodeID"]
