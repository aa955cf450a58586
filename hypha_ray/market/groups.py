"""Placement groups in Ray's table: the name of each says its run, its actor, and on which terms it was made.

It is ``run/worker-3``, or ``run/worker-3;bid=110.0;since=5120.5;price=80.0`` where owners have terms. Bid and price are
per hour, and the time is a monotonic one of the schedulers' machine. Without a price in the name, the owner has none.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from hypha_ray.market.buyer import Agreement


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
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED" and "/" in row["name"]]
    return [_entry(row) for row in rows if run is None or row["name"].startswith(f"{run}/")]


def reclaim(run: str, spared: Container[str] = ()) -> int:
    """End all leases of a run but placed ones of some names; returns their number."""
    found = [entry for entry in lease_entries(run) if not entry.placed or entry.name not in spared]
    for entry in found:
        remove_placement_group(entry.group)
    return len(found)


def _entry(row: dict[str, Any]) -> LeaseEntry:
    run, _, rest = row["name"].partition("/")
    name, *told = rest.split(";")
    node, amounts = row["bundles_to_node_id"].get(0), row["bundles"][0]
    terms = dict(part.partition("=")[::2] for part in told)
    agreed = None
    if told:
        price = float(terms["price"]) if "price" in terms else None
        role, bid, since_s = name.partition("-")[0], float(terms["bid"]), float(terms["since"])
        agreed = Agreement(node or "", role, amounts, bid, price, since_s)
    return LeaseEntry(row["placement_group_id"], run, name, row["state"] == "CREATED", node or None, amounts, agreed)
