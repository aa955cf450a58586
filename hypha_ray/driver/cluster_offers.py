"""Offers of a cluster to all runs: machines on its market, with terms and leases, and datasets that its nodes serve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hypha_ray.config.value_types import CLUSTER, is_malformed, malformed
from hypha_ray.data.actor import NODE_GROUPS, READS_AT_ONCE, DataNode
from hypha_ray.data.catalogue import is_url, name_of
from hypha_ray.data.options import PrepareOptions
from hypha_ray.data.prepare import prepare
from hypha_ray.errors import CapacityError, ClusterError, ConfigError, HyphaError
from hypha_ray.market.allotment import Ruling, Standing
from hypha_ray.market.auction import standings
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, own_node, post_labels
from hypha_ray.market.leases import LEASED, PRICING, SITE, LeaseRequest, Refusal, answers, are_posted
from hypha_ray.market.requirements import Need, NodeResources, nearest, shortage
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
from hypha_ray.texts import counted


def post(node_name: str | None, labels: Mapping[str, str]) -> str:
    """Post terms of a node, in the place of those posted before.

    Args:
        node_name: the node's address, or the beginning of its id; None: the node of this process.
        labels: terms as labels.

    Returns:
        A line about the terms that hold now.

    Raises:
        ConfigError: CFG003, there isn't one such node.

    """
    node_id = _find_node(cluster_nodes(), node_name).id
    post_labels(node_id, labels)
    node = _find_node(cluster_nodes(), node_id)
    return f"{_node_text(node.address, node.id)}: {_terms_text(_posted_terms(node))}"


def overview() -> dict[str, Any]:
    """Machines, leases of all runs, runs at the auction if it is open, and needs without a machine, for programs."""
    nodes = cluster_nodes()
    entries = lease_entries()
    runs = standings()
    return {
        "nodes": [_machine(node) for node in nodes],
        "leases": [_lease(entry) for entry in entries],
        "runs": None if runs is None else [_run(standing, ruling.quota) for standing, ruling in runs],
        "waiting": _waiting(nodes, entries, runs or []),
    }


def _machine(node: NodeResources) -> dict[str, Any]:
    return {
        "node": node.id,
        "address": node.address,
        "site": node.labels.get(SITE),
        "terms": _posted_terms(node),
        "total": {name: node.total.get(name, 0.0) for name in LEASED},
        "free": {name: node.free.get(name, 0.0) for name in LEASED},
    }


def _lease(entry: LeaseEntry) -> dict[str, Any]:
    return {
        "run": entry.run,
        "name": entry.name,
        "node": entry.node,
        "amounts": dict(entry.amounts),
        "bid": entry.agreement and entry.agreement.bid,
        "price": entry.agreement and entry.agreement.price,
    }


def _run(standing: Standing, quota: int) -> dict[str, Any]:
    return {
        "run": standing.run,
        "bid": standing.bid,
        "wanted": len(standing.needs),
        "least": standing.least,
        "quota": quota,
    }


def _waiting(
    nodes: Sequence[NodeResources], entries: Sequence[LeaseEntry], runs: Sequence[tuple[Standing, Ruling]]
) -> list[dict[str, Any]]:
    """Leases without a machine, and runs with fewer workers than they want: each with the node that comes nearest."""
    waiting_leases = []
    for entry in entries:
        if entry.node is None:
            cpu, gpu, memory = (entry.amounts.get(name, 0.0) for name in LEASED)
            need = Need(entry.name.partition("-")[0], cpu, gpu, round(memory))
            bid = entry.agreement.bid if entry.agreement else 0.0
            waiting_leases.append(_unmet_need(entry.run, need, 1, bid, nodes))
    for standing, ruling in runs:
        missing = Counter(standing.needs)
        missing.subtract(ruling.needs or {})
        for need, count in missing.items():
            if count > 0:
                waiting_leases.append(_unmet_need(standing.run, need, count, standing.bid, nodes))
    return waiting_leases


def _unmet_need(run: str, need: Need, count: int, bid: float, nodes: Sequence[NodeResources]) -> dict[str, Any]:
    nearest_node = nearest(need, nodes)
    return {
        "run": run,
        "role": need.role,
        "need": str(need),
        "count": count,
        "nearest": None if nearest_node is None else nearest_node.id,
        "reason": _obstacle(LeaseRequest(need, bid, bid), nodes),
    }


def _obstacle(request: LeaseRequest, nodes: Sequence[NodeResources]) -> str:
    """Reason that a request has to wait."""
    missing = shortage({request.need: 1}, nodes)
    if missing is not None:
        return missing.reason
    refusals = [answer for answer in answers(request, nodes) if isinstance(answer, Refusal)]
    if len(refusals) < len(nodes):
        return "there is room for one, which waits for the others of its run, or for a run that bids more"
    nearest_node = nearest(request.need, nodes)
    (refusal,) = [refusal for refusal in refusals if refusal.node is nearest_node]
    return f"{refusal.node.address} is nearest, but {refusal.reason}"


def lines(market: Mapping[str, Any]) -> Iterator[str]:
    """Lines about an overview: one for each machine, lease and run at the auction, and for all that waits."""
    machine_texts = {}
    for machine in market["nodes"]:
        text = _node_text(machine["address"], machine["node"])
        machine_texts[machine["node"]] = text
        site = f", site {machine['site']}" if machine["site"] else ""
        free = _free_text(machine["free"], machine["total"])
        yield f"{text}{site}: {_terms_text(machine['terms'])}; free: {free}"
    for lease in market["leases"]:
        yield _lease_line(lease, machine_texts)
    runs = sorted(market["runs"] or [], key=lambda run: -run["bid"])
    for rank, run in enumerate(runs, 1):
        state = "may hold" if run["quota"] >= max(1, run["least"]) else "waits; it may hold"
        workers_text = f"{counted(run['wanted'], 'worker')}, at least {run['least']}"
        yield f"{rank}. run {run['run']} bids {run['bid']:g} for {workers_text}: {state} {run['quota']}"
    for unmet_need in market["waiting"]:
        wish = f"{unmet_need['count']} × {unmet_need['role']} with {unmet_need['need']}"
        yield f"{unmet_need['run']} waits for {wish}: {unmet_need['reason']}"
    machines_text = counted(len(market["nodes"]), "machine")
    leases_text = counted(len(market["leases"]), "lease")
    prices = [lease["price"] for lease in market["leases"] if lease["price"] is not None]
    cost = f"; {sum(prices):g} per hour" if prices else ""
    yield f"{machines_text}, {leases_text}{cost}"


def _lease_line(lease: Mapping[str, Any], machine_texts: Mapping[str, str]) -> str:
    state_text = "waits for a machine"
    if lease["node"]:
        state_text = f"on {machine_texts.get(lease['node'], 'a lost machine')}"
    price = "no price" if lease["price"] is None else f"{lease['price']:g} per hour"
    bid = "" if lease["bid"] is None else f", bid {lease['bid']:g}"
    return f"lease {lease['run']}/{lease['name']} {state_text}: {price}{bid}"


def _free_text(free: Mapping[str, float], total: Mapping[str, float]) -> str:
    amounts = [f"{free[name]:g} of {total[name]:g} {name}" for name in ("CPU", "GPU") if total[name]]
    return ", ".join(amounts) or "nothing"


def _find_node(nodes: Sequence[NodeResources], name: str | None) -> NodeResources:
    """The node of that address or beginning of an id; None: of this process."""
    if name is None:
        name = own_node()
    matches = []
    for node in nodes:
        if name and (node.address == name or node.id.startswith(name)):
            matches.append(node)
    if len(matches) != 1:
        listed_nodes = ", ".join(_node_text(node.address, node.id) for node in nodes[:20])
        raise ConfigError(
            "CFG003", f"--node {name} names {len(matches)} machines", allowed=listed_nodes, fix="give an id"
        )
    return matches[0]


def _posted_terms(node: NodeResources) -> dict[str, str]:
    return {name: node.labels[name] for name in sorted(PRICING) if name in node.labels}


def _terms_text(terms: Mapping[str, str]) -> str:
    """Terms as their owner has stated them."""
    if not are_posted(terms):
        return "no terms"
    return ", ".join(f"{name} {value}" for name, value in terms.items())


def _node_text(address: str, node_id: str) -> str:
    return f"{address} ({node_id[:8]})"


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
    listed_offers = []
    for entry in ray.nodes():
        if not entry["Alive"]:
            continue
        node_id = entry["NodeID"]
        address = entry["NodeManagerAddress"]
        listed_offers.append(f"{address} ({node_id[:8]})")
        if node and (node_id.startswith(node) or address == node):
            matches.append(node_id)
    if len(matches) != 1:
        allowed = ", ".join(listed_offers)
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
