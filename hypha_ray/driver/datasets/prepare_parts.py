"""Preparation of a dataset in parts, each on a node of the cluster, which serves it from there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.data.preparation.options import PrepareOptions
from hypha_ray.data.preparation.prepare import prepare
from hypha_ray.data.storage.url_folder import name_of
from hypha_ray.driver.datasets.data_nodes import serve
from hypha_ray.errors import CapacityError, ClusterError
from hypha_ray.scheduler.runtime.slices.data_nodes import Replica
from hypha_ray.scheduler.runtime.supervised_actor import death_text


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
