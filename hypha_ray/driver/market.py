"""The market of a cluster as its users see it: machines, terms and leases; and new terms of a machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypha_ray.errors import ConfigError
from hypha_ray.market.groups import lease_entries
from hypha_ray.market.nodes import cluster_nodes, own_node, post_labels
from hypha_ray.market.offers import LEASED
from hypha_ray.market.requirements import NodeResources
from hypha_ray.market.terms import PRICING, SITE, are_posted


def post(wanted: str | None, labels: Mapping[str, str]) -> str:
    """Post terms of a node, in the place of those posted before.

    Args:
        wanted: the node's address, or the beginning of its id; None: the node of this process.
        labels: terms as labels.

    Returns:
        A line about the terms that hold now.

    Raises:
        ConfigError: CFG003, there isn't one such node.

    """
    node = _node(cluster_nodes(), wanted)
    post_labels(node.id, labels)
    (now,) = [one for one in cluster_nodes() if one.id == node.id]
    return f"{_name(now.address, now.id)}: {_terms(_told(now))}"


def overview() -> dict[str, Any]:
    """Machines with terms and resources, and leases of all runs, for programs."""
    nodes = cluster_nodes()
    machines = [
        {
            "node": node.id,
            "address": node.address,
            "site": node.labels.get(SITE),
            "terms": _told(node),
            "total": {name: node.total.get(name, 0.0) for name in LEASED},
            "free": {name: node.free.get(name, 0.0) for name in LEASED},
        }
        for node in nodes
    ]
    leases = [
        {
            "run": entry.run,
            "name": entry.name,
            "node": entry.node,
            "amounts": dict(entry.amounts),
            "bid": entry.agreement and entry.agreement.bid,
            "price": entry.agreement and entry.agreement.price,
        }
        for entry in lease_entries()
    ]
    return {"nodes": machines, "leases": leases}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines about an overview: a line for each machine, and for each lease."""
    places = {machine["node"]: _name(machine["address"], machine["node"]) for machine in found["nodes"]}
    for machine in found["nodes"]:
        room = ", ".join(f"{machine['free'][name]:g} of {total:g} {name}" for name, total in _counted(machine["total"]))
        site = f", site {machine['site']}" if machine["site"] else ""
        yield f"{places[machine['node']]}{site}: {_terms(machine['terms'])}; free: {room or 'nothing'}"
    for lease in found["leases"]:
        where = f"on {places.get(lease['node'], 'a lost machine')}" if lease["node"] else "waits for a machine"
        price = "no price" if lease["price"] is None else f"{lease['price']:g} per hour, bid {lease['bid']:g}"
        yield f"lease {lease['run']}/{lease['name']} {where}: {price}"
    yield f"{len(found['nodes'])} machines, {len(found['leases'])} leases; {_sum(found['leases']):g} per hour"


def _node(nodes: Sequence[NodeResources], wanted: str | None) -> NodeResources:
    """The node of that address or beginning of an id; None: of this process."""
    name = own_node() if wanted is None else wanted
    found = [node for node in nodes if name and (node.address == name or node.id.startswith(name))]
    if len(found) != 1:
        there = ", ".join(_name(node.address, node.id) for node in nodes[:20])
        raise ConfigError("CFG003", f"--node {name} names {len(found)} machines", allowed=there, fix="give an id")
    return found[0]


def _told(node: NodeResources) -> dict[str, str]:
    return {name: node.labels[name] for name in sorted(PRICING) if name in node.labels}


def _terms(told: Mapping[str, str]) -> str:
    """Terms as their owner has stated them."""
    if not are_posted(told):
        return "no terms"
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _counted(total: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, total[name]) for name in ("CPU", "GPU") if total[name]]


def _name(address: str, node: str) -> str:
    return f"{address} ({node[:8]})"


def _sum(leases: Sequence[Mapping[str, Any]]) -> float:
    return sum(lease["price"] or 0.0 for lease in leases)
