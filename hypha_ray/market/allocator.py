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

from hypha_ray.config.resources import Resources
from hypha_ray.errors import CapacityError, ClusterError, first_line
from hypha_ray.market.allotment import Ruling
from hypha_ray.market.auction import RULING_S
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
from hypha_ray.market.leases import Lease, LeaseBook, Offer, are_posted, has_room
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
        self._requested: dict[str, Need] = {}
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
        deadline = time.monotonic() + deadline_s
        self._requested[name] = need
        try:
            while True:
                cluster_look = await self._look()
                if not self._trades(cluster_look.nodes):
                    return await self._lease(name, need, cluster_look, deadline_s)
                offer = self._choose(name, cluster_look)
                if offer is not None:
                    with suppress(CapacityError):
                        return await self._lease(name, need, cluster_look, OFFER_S, offer)
                    self._buyer.fail(offer.node.id, time.monotonic())  # Another run was faster.
                if time.monotonic() > deadline:
                    raise self._buyer.refusal(need, cluster_look.nodes, own_node())
                self._requested[name] = need  # Another look, if the quota didn't allow it.
                await asyncio.sleep(0.0 if offer else LOOK_AGAIN_S)
        finally:
            self._requested.pop(name, None)
            self._offers.pop(name, None)
            if name not in self._groups:
                self._buyer.end(name, time.monotonic())

    async def _lease(
        self, name: str, need: Need, cluster_look: _Look, wait_s: float, offer: Offer | None = None
    ) -> Lease:
        """Lease on the node of an offer while it has room, or on any node if it is placed within `wait_s` seconds."""
        group = self._open(name, need, offer, cluster_look)
        lease = None
        try:
            ready_ref = group.ready()
            waits = 1
            while not await _done(ready_ref, wait_s):
                nodes = (await self._look()).nodes
                waits += 1
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

    def _choose(self, name: str, cluster_look: _Look) -> Offer | None:
        """Offer for a lease; the first of those that have waited for a look chooses for all of them."""
        if name in self._requested:
            allowed = self._allowed()
            for allowed_name in allowed:
                del self._requested[allowed_name]
            placed = {lease for lease, is_placed in cluster_look.leases.items() if is_placed}
            self._buyer.speeds = cluster_look.speeds
            self._offers |= self._buyer.choose(allowed, cluster_look.nodes, own_node(), placed, time.monotonic())
        return self._offers.pop(name, None)

    def adopt(self, needs: Mapping[str, Need]) -> dict[str, Lease]:
        """Take over what an earlier holder of the run has leased under these names, and what has been placed."""
        leases = {}
        for entry in lease_entries(self._run):
            if entry.name in needs and entry.placed:
                self._groups[entry.name] = needs[entry.name], entry.group
                if entry.agreement is not None:
                    self._buyer.adopt(entry.name, entry.agreement)
                leases[entry.name] = self._grant(entry.name, entry.amounts)
        return leases

    def _grant(self, name: str, amounts: Mapping[str, float]) -> Lease:
        now = time.monotonic()
        self.since_s[name] = now
        return self._book.grant(name, amounts, now)

    def nodes(self) -> list[NodeResources]:
        """The nodes that are alive, and what would be free there without these leases."""
        amounts = {lease.holder: lease.amounts for lease in self._book.leases}
        leased_amounts: dict[str, Counter[str]] = {}
        """Amounts of this run's leases by node id."""
        for name, node in self.placed().items():
            leased_amounts.setdefault(node, Counter()).update(amounts.get(name, {}))
        return cluster_nodes(leased_amounts)

    def options(self, lease: Lease, parts: int = 1) -> dict[str, Any]:
        """Options that place an actor on the lease and give it what is leased, or an equal part of it.

        Raises:
            ClusterError: the lease is over, or its node is gone; an actor would wait there for ever.

        """
        over = ClusterError("CAP004", f"the lease {self._run}/{lease.holder} is over", fix="acquire a new one")
        if not self._book.holds(lease):
            raise over
        _, group = self._groups[lease.holder]
        if placement_group_table(group)["state"] != "CREATED":
            raise over
        amounts = {name: amount / parts for name, amount in lease.amounts.items()}
        options: dict[str, Any] = {"num_cpus": amounts.get("CPU", 0.0), "num_gpus": amounts.get("GPU", 0.0)}
        if "memory" in amounts:
            options["memory"] = int(amounts["memory"])
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return options

    def placed(self) -> dict[str, str]:
        """Id of the node that each lease is on, by name: one look at Ray's table for all of them."""
        nodes = {}
        for entry in lease_entries(self._run):
            if entry.node is not None:
                nodes[entry.name] = entry.node
        return nodes

    def terms(self, name: str) -> dict[str, Any]:
        """Node and price per hour of a lease; nothing if no terms were asked for, no price if there is none."""
        agreement = self._buyer.agreement(name)
        if agreement is None:
            return {}
        terms: dict[str, Any] = {"node": agreement.node}
        if agreement.price is not None:
            terms["price"] = agreement.price
        return terms

    @property
    def pays(self) -> bool:
        """Whether the run has leases on owners' terms."""
        return self._buyer.pays

    async def ending(self) -> dict[str, str]:
        """Reasons by name of the leases whose machines the owners want back soon."""
        without_terms = self.since_s.keys() - self._buyer.names
        nodes, entries = await asyncio.to_thread(self._look_at_terms, without_terms)
        for entry in entries:
            self._agree(entry)
        return self._buyer.ending(nodes, time.monotonic())

    def _look_at_terms(self, without_terms: set[str]) -> tuple[list[NodeResources], list[LeaseEntry]]:
        """Nodes, and those of the leases without terms whose owners have some now; nothing while no owner has any.

        Labels of a node never change, so that they are looked at once for each lease; later terms are posted ones.
        """
        may_have_changed = without_terms != self._without_terms or any(posted_labels().values())
        self._without_terms = without_terms
        if not (self._buyer.pays or (without_terms and may_have_changed)):
            return [], []
        nodes = cluster_nodes()
        nodes_with_terms = {node.id for node in nodes if are_posted(node.labels)}
        entries = []
        if without_terms and nodes_with_terms:
            for entry in lease_entries(self._run):
                if entry.name in without_terms and entry.node in nodes_with_terms:
                    entries.append(entry)
        return nodes, entries

    def _agree(self, entry: LeaseEntry) -> None:
        """Hold a lease that began without terms to those of its node, at the run's bid and for no price."""
        need, _ = self._groups.get(entry.name, (None, None))
        since_s = self.since_s.get(entry.name)
        if need is not None and entry.node is not None and since_s is not None:
            bid = request_of(self._resources, need).bid
            self._buyer.agree(entry.name, Agreement(entry.node, need.role, entry.amounts, bid, None, since_s))

    def over(self) -> list[str]:
        """Names of the leases that have come to their end."""
        return self._buyer.over(time.monotonic())

    def limit(self, max_price: float, firm_only: bool) -> None:
        """Limit the prices of workers' new leases, and lease spot machines or none."""
        self._buyer.max_price = max_price
        self._buyer.firm_only = firm_only

    def owed(self) -> float:
        """Cost since the last bill."""
        return self._buyer.owed(time.monotonic())

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
        if ruling is None:
            return
        now = time.monotonic()
        reasons = {}
        for name, reason in ruling.leave.items():
            since_s = self.since_s.get(name)
            if since_s is not None and since_s <= now - RULING_S:  # The ruling doesn't know of younger leases.
                reasons[name] = reason
        self._buyer.take_notice(reasons, now)

    def speeds(self) -> Speeds:
        """Speeds of the run's workers that were measured, for a strategy that asks for them."""
        if self.training is None or self._resources.strategy != "value":
            return UNKNOWN
        return posted_speeds(self.training)

    def _trades(self, nodes: list[NodeResources]) -> bool:
        return self._ruling is not None or trades(self._resources, nodes)

    def _allowed(self) -> dict[str, Need]:
        """Requested leases that are within the quota."""
        workers = []
        allowed = {}
        for name, need in self._requested.items():
            if need.role == "worker":
                workers.append(name)
            else:
                allowed[name] = need
        leased_needs = Counter[Need]()
        for need, _ in self._groups.values():
            if need.role == "worker":
                leased_needs[need] += 1
        for name in sorted(workers, key=_number):
            need = self._requested[name]
            if self._ruling is None or self._ruling.allows(need, leased_needs):
                leased_needs[need] += 1
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

    def _open(self, name: str, need: Need, offer: Offer | None, cluster_look: _Look) -> PlacementGroup:
        """Ask Ray for the group; it says at once if the name is taken."""
        bundle = need.bundle()
        selector = need.selector(cluster_look.nodes)
        full_name = group_name(self._run, name)
        if offer is not None:
            if name in cluster_look.leases:
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
        if name in self._groups:
            _, group = self._groups.pop(name)
            remove_placement_group(group)

    def _no_room(self, name: str, need: Need, nodes: list[NodeResources]) -> CapacityError:
        """Reason of a failed lease: this run asks for too much, or others hold the resources."""
        idle_nodes = [replace(node, free=node.total) for node in nodes]
        needs_of_run = Counter(group_need for group_need, _ in self._groups.values())
        missing = shortage(needs_of_run, idle_nodes) or shortage({need: 1}, nodes)
        if missing is not None:
            return missing.error()
        late_problem = f"Ray placed {self._run}/{name} too late"
        return CapacityError("CFG004", late_problem, fix="raise resources.start_deadline_s")


def _number(name: str) -> int:
    _, _, worker = name.rpartition("-")
    return int(worker)


async def _done(ready_ref: Any, wait_s: float) -> bool:
    """Whether Ray has placed a group before the end of a wait."""
    try:
        await asyncio.wait_for(ready_ref, wait_s)
    except TimeoutError:
        return False
    return True


def _refused(group: str, reason: str) -> ClusterError:
    return ClusterError("CAP003", f"Ray refused the lease {group}: {reason}", fix="end the run of that name first")
