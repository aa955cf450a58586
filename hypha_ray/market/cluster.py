"""Nodes and placement groups of the cluster, with the terms and speeds that are posted for its nodes.

Posted terms and speeds are in the key-value store of Ray's control service. Posted terms stand in for labels of the
same names, which a running node can't change. An entry of a node that is gone is never read: a new node has a new id.

The name of a placement group says its run, its actor, and on which terms it was made. It is ``run/worker-3``, or
``run/worker-3;bid=110.0;since=5120.5;price=80.0`` if owners have terms. Bid and price are per hour, and the time is a
monotonic one of the schedulers' machine. Without a price in the name, the owner has none. Groups of other programs may
have any names. One that isn't written like this is no lease, and stays as it is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray._private.worker import global_worker
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config import Job
from hypha_ray.config.load import with_absolute_folders
from hypha_ray.market.buyer import Agreement
from hypha_ray.market.requirements import NodeResources
from hypha_ray.market.selection import UNKNOWN, Speeds, training_key

NAMESPACE = b"hypha_ray"
PREFIX = b"terms/"
SPEEDS = "speeds"
NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
LEASE = re.compile(
    r"(?P<run>[^/]+)/(?P<name>(?P<role>worker|server|generator)-\d+)"
    rf"(?:;bid=(?P<bid>{NUMBER}|inf);since=(?P<since>{NUMBER})(?:;price=(?P<price>{NUMBER}))?)?"
)
"""Name of a lease's placement group."""


def cluster_nodes(leased_amounts: Mapping[str, Mapping[str, float]] | None = None) -> list[NodeResources]:
    """The nodes that are alive, and what is free on them at this moment.

    Args:
        leased_amounts: amounts by node id that are to be counted as free.

    """
    free = available_resources_per_node()
    leased_amounts = leased_amounts or {}
    labels_by_node = posted_labels()
    nodes = []
    for entry in ray.nodes():
        if entry["Alive"]:
            node_id = entry["NodeID"]
            free_here = Counter(free.get(node_id, {})) + Counter(leased_amounts.get(node_id, {}))
            labels = {**entry["Labels"], **labels_by_node.get(node_id, {})}
            nodes.append(NodeResources(entry["NodeManagerAddress"], entry["Resources"], free_here, labels))
    return nodes


def draining_nodes() -> frozenset[str]:
    """Ids of nodes that Ray is about to take away, such as spot machines with notice."""
    return frozenset(state.get_draining_nodes())


def own_node() -> str:
    """Ray's id of the node that this process is on."""
    context = ray.get_runtime_context()
    return str(context.get_node_id())


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
    """Post samples per second by the names of `places`; later ones replace those posted before."""
    for name, speed in speeds.items():
        key = f"{SPEEDS}/{training}/{name}"
        _put(key.encode(), speed)


def _entries(prefix: bytes) -> dict[str, Any]:
    """Entries whose keys begin with a prefix, by what follows it."""
    client = global_worker.gcs_client
    keys = client.internal_kv_keys(prefix, NAMESPACE)
    if not keys:
        return {}
    entries = {}
    for key, value in client.internal_kv_multi_get(keys, NAMESPACE).items():
        name = key.removeprefix(prefix).decode()
        entries[name] = json.loads(value)
    return entries


def _put(key: bytes, value: object) -> None:
    text = json.dumps(value)
    global_worker.gcs_client.internal_kv_put(key, text.encode(), True, NAMESPACE)


@dataclass(frozen=True, slots=True)
class LeaseEntry:
    """Entry of a lease in Ray's table.

    Attributes:
        node: id of the node; None while it waits for one.
        agreement: terms; None if no owner had any.

    """

    id: str
    run: str
    name: str
    placed: bool
    node: str | None
    amounts: Mapping[str, float]
    agreement: Agreement | None

    @property
    def group(self) -> PlacementGroup:
        """Handle of the placement group."""
        return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(self.id)))


def group_name(run: str, name: str, agreement: Agreement | None = None) -> str:
    """Name of a lease's placement group."""
    if agreement is None:
        return f"{run}/{name}"
    price = "" if agreement.price is None else f";price={agreement.price!r}"
    return f"{run}/{name};bid={agreement.bid!r};since={agreement.since_s!r}{price}"


def lease_entries(run: str | None = None) -> list[LeaseEntry]:
    """Leases of a run, or of all runs, that aren't over; also those that wait for room."""
    entries = []
    for row in placement_group_table().values():
        if row["state"] == "REMOVED":
            continue
        entry = _entry(row, LEASE.fullmatch(row["name"]))
        if entry is not None and run in (None, entry.run):
            entries.append(entry)
    return entries


def reclaim(run: str, spared_leases: Container[str] = ()) -> int:
    """End all leases of a run but placed ones of some names; returns their number."""
    count = 0
    for entry in lease_entries(run):
        if not entry.placed or entry.name not in spared_leases:
            remove_placement_group(entry.group)
            count += 1
    return count


def _entry(row: dict[str, Any], name: re.Match[str] | None) -> LeaseEntry | None:
    """Entry of a row whose name has been read; None if it is another program's."""
    if name is None or len(row["bundles"]) != 1:
        return None
    node = row["bundles_to_node_id"].get(0)
    amounts = row["bundles"][0]
    agreement = None
    if name["bid"] is not None:
        price = None if name["price"] is None else float(name["price"])
        agreement = Agreement(node or "", name["role"], amounts, float(name["bid"]), price, float(name["since"]))
    placed = row["state"] == "CREATED"
    return LeaseEntry(row["placement_group_id"], name["run"], name["name"], placed, node or None, amounts, agreement)
