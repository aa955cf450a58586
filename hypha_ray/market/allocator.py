"""Leases of a cluster's resources: one placement group for each actor.

    acquire ──placed──► lease ──options──► an actor on it ──release──► gone, the actor too
       └──not placed by the deadline──► CapacityError, and nothing stays behind

Where owners have terms, the buyer chooses a node and the group is pinned to it; bid and price are in the group's name.
A placement group outlives the actor that made it. So a resumed run first reclaims what was held before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hypha_ray.config.tables.resources import Resources
from hypha_ray.errors import CapacityError, ClusterError, first_line
from hypha_ray.market.auction.allotment import Ruling
from hypha_ray.market.auction.attendance import RULING_S
from hypha_ray.market.buyer import Agreement, Buyer, request_of, trades
from hypha_ray.market.cluster import (
    LeaseEntry,
    cluster_nodes,
    group_name,
    lease_entries,
    own_node,
    posted_labels,
    posted_speeds,
)
from hypha_ray.market.leases import Lease, LeaseBook
from hypha_ray.market.offers import Offer, are_posted, has_room
from hypha_ray.market.requirements import ID_LABEL, Need, NodeResources, shortage
from hypha_ray.market.selection import UNKNOWN, Speeds

OFFER_S = 2.0
OFFER_WAITS = 15
"""Seconds after which a node that has made an offer is asked whether it still has room, and how often at most."""
LOOK_AGAIN_S = 1.0
"""Seconds between two looks for an offer."""

__all__ = ["Lease", "Leases"]


@dataclass(frozen=True, slots=True)
class _Look:
    """A look at the cluster: its nodes, and speeds on them that were measured.

    If owners have terms, `leases` says of each of the run's leases by name whether it is placed.
    """

    nodes: list[NodeResources]
    leases: Mapping[str, bool]
    speeds: Speeds


class Leases:
    """The leases of one run. Ray counts what is free; the book says which leases are good.

    Args:
        run: name of the run; its groups are called ``<run>/<name>``, with bid and price behind a semicolon.
        resources: the job's prices, strategy and limit among offers.

    """

    def __init__(self, run: str, resources: Resources | None = None) -> None:
        self._run = run
        self._resources = resources or Resources()
        self._book = LeaseBook()
        self._buyer = Buyer(self._resources)
        self._groups: dict[str, tuple[Need, PlacementGroup]] = {}
        """Placement groups of all leases, and of those that still wait for room."""
        self._looking: asyncio.Task[_Look] | None = None
        """The latest look at the cluster's nodes."""
        self._ruling: Ruling | None = None
        """Latest ruling of the auction; None without one."""
        self.since_s: dict[str, float] = {}
        """Monotonic time by name since which each lease is known."""
        self._without_terms = set[str]()
        """Names of the leases without terms at the latest look."""
        self.training: str | None = None
        """Key of the training, by which its measured speeds are found; None: it has none."""
        self._asked: dict[str, Need] = {}
        """Needs by name of leases whose machines are yet to be chosen."""
        self._offers: dict[str, Offer] = {}
        """Offers by name of leases that aren't asked for yet."""

    async def acquire(self, name: str, need: Need, deadline_s: float) -> Lease:
        """Lease what `need` says, under the name of the actor that will live there.

        Raises:
            CapacityError: the cluster had no room within `deadline_s` seconds.
            ClusterError: a group of that name is there already, or Ray doesn't answer.

        """
        if name in self._groups:
            raise _refused(group_name(self._run, name), "it is there already")
        deadline, self._asked[name] = time.monotonic() + deadline_s, need
        try:
            while True:
                look = await self._look()
                if not self._trades(look.nodes):
                    return await self._lease(name, need, look, deadline_s)
                offer = self._choose(name, look)
                if offer is not None:
                    with suppress(CapacityError):
                        return await self._lease(name, need, look, OFFER_S, offer)
                    self._buyer.fail(offer.node.id, time.monotonic())  # Another run was faster.
                if time.monotonic() > deadline:
                    raise self._buyer.refusal(need, look.nodes, own_node())
                self._asked[name] = need  # Another look, if the quota didn't allow it.
                await asyncio.sleep(0.0 if offer else LOOK_AGAIN_S)
        finally:
            self._asked.pop(name, None)
            self._offers.pop(name, None)
            if name not in self._groups:
                self._buyer.end(name, time.monotonic())

    async def _lease(self, name: str, need: Need, look: _Look, wait_s: float, offer: Offer | None = None) -> Lease:
        """Lease on the node of an offer while it has room, or on any node if it is placed within `wait_s` seconds."""
        group = self._open(name, need, offer, look)
        lease = None
        try:
            ready = group.ready()
            waits = 1
            while not await _done(ready, wait_s):
                nodes = (await self._look()).nodes
                waits = waits + 1
                if offer is None or waits > OFFER_WAITS or not has_room(offer, nodes):
                    raise self._no_room(name, need, nodes)
            amounts = need.bundle() if offer is None else offer.amounts
            lease = self._grant(name, amounts)
            if offer is not None:
                self._buyer.begin(name)
        except RayError as error:
            raise _refused(group_name(self._run, name), first_line(error)) from error
        finally:
            if lease is None:
                self._close(name)
        return lease

    def _choose(self, name: str, look: _Look) -> Offer | None:
        """Offer for a lease; the first of those that have waited for a look chooses for all of them."""
        if name in self._asked:
            asked = self._allowed()
            self._asked = {name: need for name, need in self._asked.items() if name not in asked}
            placed = {lease for lease, is_there in look.leases.items() if is_there}
            self._buyer.speeds = look.speeds
            self._offers |= self._buyer.choose(asked, look.nodes, own_node(), placed, time.monotonic())
        return self._offers.pop(name, None)

    def adopt(self, needs: Mapping[str, Need]) -> dict[str, Lease]:
        """Take over what an earlier holder of the run has leased under these names, and what has been placed."""
        found = {entry.name: entry for entry in lease_entries(self._run) if entry.name in needs and entry.placed}
        for name, entry in found.items():
            self._groups[name] = needs[name], entry.group
            if entry.agreement is not None:
                self._buyer.adopt(name, entry.agreement)
        return {name: self._grant(name, entry.amounts) for name, entry in found.items()}

    def _grant(self, name: str, amounts: Mapping[str, float]) -> Lease:
        self.since_s[name] = now = time.monotonic()
        return self._book.grant(name, amounts, now)

    def nodes(self) -> list[NodeResources]:
        """The nodes that are alive, and what would be free there without these leases."""
        amounts = {lease.holder: lease.amounts for lease in self._book.leases}
        held: dict[str, Counter[str]] = {}
        for name, node in self.placed().items():
            held.setdefault(node, Counter()).update(amounts.get(name, {}))
        return cluster_nodes(held)

    def options(self, lease: Lease, parts: int = 1) -> dict[str, Any]:
        """Options that place an actor on the lease and give it what is leased, or an equal part of it.

        Raises:
            ClusterError: the lease is over, or its node is gone; an actor would wait there for ever.

        """
        group = self._groups[lease.holder][1] if self._book.holds(lease) else None
        if group is None or placement_group_table(group)["state"] != "CREATED":
            raise ClusterError("CAP004", f"the lease {self._run}/{lease.holder} is over", fix="acquire a new one")
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        amounts = {name: amount / parts for name, amount in lease.amounts.items()}
        memory = {"memory": int(amounts["memory"])} if "memory" in amounts else {}
        cores = {"num_cpus": amounts.get("CPU", 0.0), "num_gpus": amounts.get("GPU", 0.0)}
        return {**cores, **memory, "scheduling_strategy": place}

    def placed(self) -> dict[str, str]:
        """Id of the node that each lease is on, by name: one look at Ray's table for all of them."""
        return {entry.name: entry.node for entry in lease_entries(self._run) if entry.node is not None}

    def terms(self, name: str) -> dict[str, Any]:
        """Node and price per hour of a lease; nothing if no terms were asked for, no price if there is none."""
        agreed = self._buyer.agreement(name)
        price = {} if agreed is None or agreed.price is None else {"price": agreed.price}
        return {} if agreed is None else {"node": agreed.node, **price}

    @property
    def pays(self) -> bool:
        """Whether the run has leases on owners' terms."""
        return self._buyer.pays

    async def ending(self) -> dict[str, str]:
        """Reasons by name of the leases whose machines the owners want back soon."""
        without = self.since_s.keys() - self._buyer.names
        nodes, began_without = await asyncio.to_thread(self._look_at_terms, without)
        for entry in began_without:
            self._agree(entry)
        return self._buyer.ending(nodes, time.monotonic())

    def _look_at_terms(self, without: set[str]) -> tuple[list[NodeResources], list[LeaseEntry]]:
        """Nodes, and those of the leases without terms whose owners have some now; nothing while no owner has any.

        Labels of a node never change, so that they are looked at once for each lease; later terms are posted ones.
        """
        news = without != self._without_terms or any(posted_labels().values())
        self._without_terms = without
        if not (self._buyer.pays or (without and news)):
            return [], []
        nodes = cluster_nodes()
        owned = {node.id for node in nodes if are_posted(node.labels)}
        entries = lease_entries(self._run) if without and owned else []
        return nodes, [entry for entry in entries if entry.name in without and entry.node in owned]

    def _agree(self, entry: LeaseEntry) -> None:
        """Hold a lease that began without terms to those of its node, at the run's bid and for no price."""
        need = self._groups.get(entry.name, (None, None))[0]
        since_s = self.since_s.get(entry.name)
        if need is not None and entry.node is not None and since_s is not None:
            bid = request_of(self._resources, need).bid
            self._buyer.agree(entry.name, Agreement(entry.node, need.role, entry.amounts, bid, None, since_s))

    def over(self) -> list[str]:
        """Names of the leases that have come to their end."""
        return self._buyer.over(time.monotonic())

    def bill(self) -> float | None:
        """Cost since the last bill; None without any price."""
        return self._buyer.bill(time.monotonic())

    def billed(self, until_s: float) -> None:
        """Don't bill anew for what an earlier scheduler has billed, up to a monotonic time."""
        self._buyer.billed(until_s)

    def release(self, lease: Lease) -> None:
        """Give a lease back, which ends the actors on it; nothing happens if it is over."""
        if self._book.release(lease):
            self._close(lease.holder)

    def release_all(self) -> None:
        """Give back every lease of this object, and whatever still waits for room."""
        for lease in self._book.leases:
            self.release(lease)
        for name in list(self._groups):
            self._close(name)

    def obey(self, ruling: Ruling | None) -> None:
        """Hold no more workers than the auction allows, and hand back what it names; None: there is no auction."""
        self._ruling = ruling
        if ruling is not None:
            heard_s = time.monotonic() - RULING_S  # A lease that is younger than the ruling isn't meant.
            old = {name for name, since_s in self.since_s.items() if since_s <= heard_s}
            self._buyer.take_notice(
                {name: reason for name, reason in ruling.leave.items() if name in old}, time.monotonic()
            )

    def speeds(self) -> Speeds:
        """Speeds of the run's workers that were measured, for a strategy that asks for them."""
        asked = self.training is not None and self._resources.strategy == "value"
        return posted_speeds(str(self.training)) if asked else UNKNOWN

    def _trades(self, nodes: list[NodeResources]) -> bool:
        return self._ruling is not None or trades(self._resources, nodes)

    def _allowed(self) -> dict[str, Need]:
        """Leases that are asked for and within the quota."""
        workers = sorted((name for name, need in self._asked.items() if need.role == "worker"), key=_number)
        held = Counter(need for need, _ in self._groups.values() if need.role == "worker")
        allowed = {name: need for name, need in self._asked.items() if need.role != "worker"}
        for name in workers:
            need = self._asked[name]
            if self._ruling is None or self._ruling.allows(need, held):
                held[need] += 1
                allowed[name] = need
        return allowed

    async def _look(self) -> _Look:
        """Look at the cluster's nodes: one look for all leases that are asked for at the same time."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look_around))
        return await asyncio.shield(self._looking)

    def _look_around(self) -> _Look:
        nodes = cluster_nodes()
        leases = lease_entries(self._run) if self._trades(nodes) else []
        return _Look(nodes, {lease.name: lease.placed for lease in leases}, self.speeds())

    def _open(self, name: str, need: Need, offer: Offer | None, look: _Look) -> PlacementGroup:
        """Ask Ray for the group; it says at once if the name is taken."""
        bundle = need.bundle()
        selector = need.selector(look.nodes)
        full_name = group_name(self._run, name)
        if offer is not None:
            if name in look.leases:
                raise _refused(full_name, "it is there already")
            bundle = dict(offer.amounts)
            selector = {ID_LABEL: offer.node.id}
            full_name = group_name(self._run, name, self._buyer.agreement(name))
        try:
            group = placement_group([bundle], "PACK", full_name, bundle_label_selector=[selector])
        except RayError as error:
            raise _refused(full_name, first_line(error)) from error
        self._groups[name] = need, group
        return group

    def _close(self, name: str) -> None:
        self._buyer.end(name, time.monotonic())
        self.since_s.pop(name, None)
        found = self._groups.pop(name, None)
        if found is not None:
            remove_placement_group(found[1])

    def _no_room(self, name: str, need: Need, nodes: list[NodeResources]) -> CapacityError:
        """Reason of a failed lease: this run asks for too much, or others hold the resources."""
        idle = [replace(node, free=node.total) for node in nodes]
        missing = shortage(Counter(wanted for wanted, _ in self._groups.values()), idle) or shortage({need: 1}, nodes)
        if missing is not None:
            return missing.error()
        late = f"Ray placed {self._run}/{name} too late"
        return CapacityError("CFG004", late, fix="raise resources.start_deadline_s")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


async def _done(ready: Any, wait_s: float) -> bool:
    """Whether Ray has placed a group before the end of a wait."""
    try:
        await asyncio.wait_for(ready, wait_s)
    except TimeoutError:
        return False
    return True


def _refused(group: str, why: str) -> ClusterError:
    what = f"Ray refused the lease {group}: {why}"
    return ClusterError("CAP003", what, fix="end the run of that name first")
