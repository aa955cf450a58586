"""The market of a cluster as its users see it: machines, terms and leases; and new terms of a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypha_ray.errors import ConfigError
from hypha_ray.market.allotment import Ruling, Standing
from hypha_ray.market.auction import standings
from hypha_ray.market.cluster import LeaseEntry, cluster_nodes, lease_entries, own_node, post_labels
from hypha_ray.market.leases import LEASED, PRICING, SITE, LeaseRequest, Refusal, answers, are_posted
from hypha_ray.market.requirements import Need, NodeResources, nearest, shortage
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
    waiting = []
    for entry in entries:
        if entry.node is None:
            cpu, gpu, memory = (entry.amounts.get(name, 0.0) for name in LEASED)
            need = Need(entry.name.partition("-")[0], cpu, gpu, round(memory))
            bid = entry.agreement.bid if entry.agreement else 0.0
            waiting.append(_unmet_need(entry.run, need, 1, bid, nodes))
    for standing, ruling in runs:
        missing = Counter(standing.needs)
        missing.subtract(ruling.needs or {})
        for need, count in missing.items():
            if count > 0:
                waiting.append(_unmet_need(standing.run, need, count, standing.bid, nodes))
    return waiting


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
        workers = f"{counted(run['wanted'], 'worker')}, at least {run['least']}"
        yield f"{rank}. run {run['run']} bids {run['bid']:g} for {workers}: {state} {run['quota']}"
    for unmet in market["waiting"]:
        yield f"{unmet['run']} waits for {unmet['count']} × {unmet['role']} with {unmet['need']}: {unmet['reason']}"
    machines = counted(len(market["nodes"]), "machine")
    leases = counted(len(market["leases"]), "lease")
    prices = [lease["price"] for lease in market["leases"] if lease["price"] is not None]
    cost = f"; {sum(prices):g} per hour" if prices else ""
    yield f"{machines}, {leases}{cost}"


def _lease_line(lease: Mapping[str, Any], machine_texts: Mapping[str, str]) -> str:
    state = "waits for a machine"
    if lease["node"]:
        state = f"on {machine_texts.get(lease['node'], 'a lost machine')}"
    price = "no price" if lease["price"] is None else f"{lease['price']:g} per hour"
    bid = "" if lease["bid"] is None else f", bid {lease['bid']:g}"
    return f"lease {lease['run']}/{lease['name']} {state}: {price}{bid}"


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
        listed = ", ".join(_node_text(node.address, node.id) for node in nodes[:20])
        raise ConfigError("CFG003", f"--node {name} names {len(matches)} machines", allowed=listed, fix="give an id")
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
