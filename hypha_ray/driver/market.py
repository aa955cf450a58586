"""The market of a cluster as its users see it: machines, terms and leases; and new terms of a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypha_ray.errors import ConfigError
from hypha_ray.market.auction.allotment import Ruling, Standing
from hypha_ray.market.auction.client import standings
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, own_node, post_labels
from hypha_ray.market.offers import LEASED, PRICING, SITE, Refusal, Request, answers, are_posted
from hypha_ray.market.requirements import Need, NodeResources, nearest, shortage
from hypha_ray.texts import counted


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
    """Machines, leases of all runs, runs at the exchange if it is open, and what waits for room, for programs."""
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
        "terms": _told(node),
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
    wanted = len(standing.needs)
    return {"run": standing.run, "bid": standing.bid, "wanted": wanted, "least": standing.least, "quota": quota}


def _waiting(
    nodes: Sequence[NodeResources], entries: Sequence[LeaseEntry], runs: Sequence[tuple[Standing, Ruling]]
) -> list[dict[str, Any]]:
    """Leases without a machine, and runs with fewer workers than they want: each with the node that comes nearest."""
    waiting: list[tuple[str, Need, int, float]] = []
    for entry in entries:
        if entry.node is None:
            cpu, gpu, memory = (entry.amounts.get(name, 0.0) for name in LEASED)
            need = Need(entry.name.partition("-")[0], cpu, gpu, round(memory))
            waiting.append((entry.run, need, 1, entry.agreement.bid if entry.agreement else 0.0))
    for standing, ruling in runs:
        short = Counter(standing.needs)
        short.subtract(ruling.needs or {})
        waiting += [(standing.run, need, count, standing.bid) for need, count in short.items() if count > 0]
    return [
        {
            "run": run,
            "role": need.role,
            "need": str(need),
            "count": count,
            "nearest": near.id if (near := nearest(need, nodes)) is not None else None,
            "reason": _obstacle(Request(need, bid, bid), nodes),
        }
        for run, need, count, bid in waiting
    ]


def _obstacle(request: Request, nodes: Sequence[NodeResources]) -> str:
    """Reason that a request has to wait."""
    missing = shortage({request.need: 1}, nodes)
    if missing is not None:
        return missing.reason
    refusals = [answer for answer in answers(request, nodes) if isinstance(answer, Refusal)]
    if len(refusals) < len(nodes):
        return "there is room for one, which waits for the others of its run, or for a run that bids more"
    near = nearest(request.need, nodes)
    return next(f"{one.node.address} is nearest, but {one.reason}" for one in refusals if one.node is near)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines about an overview: one for each machine, lease and run at the exchange, and for all that waits."""
    places = {machine["node"]: _name(machine["address"], machine["node"]) for machine in found["nodes"]}
    for machine in found["nodes"]:
        room = ", ".join(f"{machine['free'][name]:g} of {total:g} {name}" for name, total in _amounts(machine["total"]))
        site = f", site {machine['site']}" if machine["site"] else ""
        yield f"{places[machine['node']]}{site}: {_terms(machine['terms'])}; free: {room or 'nothing'}"
    for lease in found["leases"]:
        where = f"on {places.get(lease['node'], 'a lost machine')}" if lease["node"] else "waits for a machine"
        price = "no price" if lease["price"] is None else f"{lease['price']:g} per hour"
        bid = "" if lease["bid"] is None else f", bid {lease['bid']:g}"
        yield f"lease {lease['run']}/{lease['name']} {where}: {price}{bid}"
    for place, one in enumerate(sorted(found["runs"] or [], key=lambda one: -one["bid"]), 1):
        state = "may hold" if one["quota"] >= max(1, one["least"]) else "waits; it may hold"
        wanted = f"{counted(one['wanted'], 'worker')}, at least {one['least']}"
        yield f"{place}. run {one['run']} bids {one['bid']:g} for {wanted}: {state} {one['quota']}"
    for one in found["waiting"]:
        yield f"{one['run']} waits for {one['count']} × {one['role']} with {one['need']}: {one['reason']}"
    prices = [lease["price"] for lease in found["leases"] if lease["price"] is not None]
    paid = f"; {sum(prices):g} per hour" if prices else ""
    yield f"{counted(len(found['nodes']), 'machine')}, {counted(len(found['leases']), 'lease')}{paid}"


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


def _amounts(total: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, total[name]) for name in ("CPU", "GPU") if total[name]]


def _name(address: str, node: str) -> str:
    return f"{address} ({node[:8]})"
