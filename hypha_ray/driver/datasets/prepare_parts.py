"""Preparation of a dataset in parts, each on a node of the cluster, which serves it from there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.data.preparation.options import Options
from hypha_ray.data.preparation.prepare import prepare
from hypha_ray.data.storage.url_folder import name_of
from hypha_ray.driver.datasets.data_nodes import serve
from hypha_ray.errors import CapacityError, ClusterError
from hypha_ray.scheduler.runtime.slices.data_nodes import Replica
from hypha_ray.scheduler.runtime.supervised_actor import death_text


def prepare_on_nodes(options: Options) -> list[Replica]:
    """Prepare `options.nodes` parts at the same time, and serve them under one name.

    Part i is left in the folder ``part-<i>`` of `options.out` on its node. The source has to be readable on all nodes.

    Raises:
        CapacityError: the cluster has fewer nodes.
        ClusterError: a node was lost meanwhile.
        HyphaError: see `prepare`.

    """
    options.check()
    count = int(options.nodes or 1)
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=_order)[:count]
    if len(nodes) < count:
        fix = "start more nodes, or give a smaller --nodes"
        raise CapacityError("CFG004", "the cluster has fewer nodes than --nodes", f"{len(nodes)}", f"{count}", fix)
    folder = options.out if options.out.startswith("~") else str(Path(options.out).absolute())
    name = options.name or name_of(folder)
    places = [f"{folder}/part-{number}" for number in range(count)]
    tasks = []
    for number, (node, place) in enumerate(zip(nodes, places, strict=True)):
        own = replace(options, out=place, part=f"{number}/{count}", nodes=None, name=None)
        where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        tasks.append(ray.remote(num_cpus=0, scheduling_strategy=where, max_retries=0)(_prepare).remote(own))
    try:
        ray.get(tasks)
    except RayTaskError:
        raise  # The error of the preparation itself.
    except RayError as error:
        what = "a part isn't prepared"
        fix = "give the same command again: each part is prepared anew"
        raise ClusterError("NET014", what, death_text(error), fix=fix) from None
    return [serve(place, name, node["NodeID"]) for node, place in zip(nodes, places, strict=True)]


def _prepare(options: Options) -> None:
    prepare(options, lambda what, number: None, datetime.now(UTC).isoformat(timespec="seconds"))


def _order(node: dict[str, Any]) -> tuple[bool, str]:
    """Nodes with CPUs first."""
    return not node["Resources"].get("CPU"), node["NodeID"]
