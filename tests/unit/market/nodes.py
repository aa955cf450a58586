"""Nodes with owners' terms, for tests of the market."""

from __future__ import annotations

from hypha_ray.market.requirements import ID_LABEL, NodeResources


def node(name: str, cpus: float = 1, free: float | None = None, **terms: str | float) -> NodeResources:
    """A node with some CPUs, all of them free unless told otherwise; terms are labels."""
    labels = {ID_LABEL: name} | {
        key: f"{value:g}" if not isinstance(value, str) else value for key, value in terms.items()
    }
    return NodeResources(f"at-{name}", {"CPU": cpus}, {"CPU": cpus if free is None else free}, labels)
