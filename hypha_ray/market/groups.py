"""Placement groups in Ray's table: the name of each says its run, its actor, and on which terms it was made.

It is ``run/worker-3``, or ``run/worker-3;bid=110.0;since=5120.5;price=80.0`` where owners have terms. Bid and price are
per hour, and the time is a monotonic one of the schedulers' machine. Without a price in the name, the owner has none.
Groups of other programs may have any names. One that isn't written like this is no lease, and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from hypha_ray.market.buyer import Agreement

NUMBER = r"\d+(?:\.\d+)?(?:e[-+]?\d+)?"
LEASE = re.compile(
    r"(?P<run>[^/]+)/(?P<name>(?P<role>worker|server)-\d+)"
    rf"(?:;bid=(?P<bid>{NUMBER}|inf);since=(?P<since>{NUMBER})(?:;price=(?P<price>{NUMBER}))?)?"
)
"""Name of a lease's placement group."""


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
    rows = [row for row in placement_group_table().values() if row["state"] != "REMOVED"]
    entries = [_entry(row, LEASE.fullmatch(row["name"])) for row in rows]
    return [entry for entry in entries if entry is not None and run in (None, entry.run)]


def reclaim(run: str, spared: Container[str] = ()) -> int:
    """End all leases of a run but placed ones of some names; returns their number."""
    found = [entry for entry in lease_entries(run) if not entry.placed or entry.name not in spared]
    for entry in found:
        remove_placement_group(entry.group)
    return len(found)


def _entry(row: dict[str, Any], name: re.Match[str] | None) -> LeaseEntry | None:
    """Entry of a row whose name has been read; None if it is another program's."""
    if name is None or len(row["bundles"]) != 1:
        return None
    node = row["bundles_to_node_id"].get(0)
    amounts = row["bundles"][0]
    agreed = None
    if name["bid"] is not None:
        price = None if name["price"] is None else float(name["price"])
        agreed = Agreement(node or "", name["role"], amounts, float(name["bid"]), price, float(name["since"]))
    placed = row["state"] == "CREATED"
    return LeaseEntry(row["placement_group_id"], name["run"], name["name"], placed, node or None, amounts, agreed)
