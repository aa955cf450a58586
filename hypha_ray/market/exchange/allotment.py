"""The exchange of a cluster: how many workers each of several competing runs may hold.

    standings of runs, Ray's table of leases, nodes ──► allot ──► for each run: a quota, and leases to hand back

It never leases anything: Ray's table of placement groups is the only account of what is taken, and a run makes its own
groups. So nothing is granted twice, and a new exchange knows all once the runs have spoken again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hypha_ray.market.offers import Offer, Request, answers, fits
from hypha_ray.market.requirements import Need, NodeResources

Order: TypeAlias = Literal["bid", "fair"]
OUTBID = 1.1
"""Least ratio of two bids at which the higher one takes a lease away."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Standing of a run: its bid, needs of all workers that it wants, and number of those without which it pauses.

    Attributes:
        begun: whether it has committed a round with them; until then, it may have to give way with all of them.

    """

    run: str
    bid: float
    needs: tuple[Need, ...]
    least: int
    begun: bool = True


@dataclass(frozen=True, slots=True)
class Holding:
    """Lease that a run has for a worker, since a time that only orders leases of one run."""

    name: str
    node: str
    amounts: Mapping[str, float]
    since_s: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """Ruling on a run: number of workers that it may hold, and names of leases to hand back, each with the reason."""

    quota: int
    leave: Mapping[str, str] = field(default_factory=dict)


class Allotment:
    """Allotment of room among runs, in the order in which they are served.

    Args:
        nodes: nodes, with what is free there.
        standings: runs, those that came first in front.
        holdings: leases of these runs' workers.
        order: "bid" serves the highest bid first; "fair" gives each run a share in the ratio of its bid.

    """

    def __init__(
        self,
        nodes: Sequence[NodeResources],
        standings: Sequence[Standing],
        holdings: Mapping[str, Sequence[Holding]],
        order: Order = "bid",
    ) -> None:
        self._nodes, self._order = nodes, order
        self._free = {node.id: Counter(node.free) for node in nodes}
        self._standings = standings
        self._kept = {one.run: sorted(holdings.get(one.run, ()), key=_age) for one in standings}
        self._granted = {run: len(held) for run, held in self._kept.items()}
        self._offers: dict[Request, list[Offer]] = {}
        self._leave: dict[str, dict[str, str]] = {one.run: {} for one in standings}

    def rulings(self) -> dict[str, Ruling]:
        """Serve all runs: first with what they can't do without, the highest bid in front; then with the rest."""
        growing: dict[str, Standing] = {}
        for standing in sorted(self._standings, key=lambda one: -one.bid):
            if not self._serve_least(standing):
                break  # A run that bids less takes no room that this one waits for.
            growing[standing.run] = standing
        while growing:
            standing = min(growing.values(), key=self._turn)
            if not self._serve_next(standing):
                del growing[standing.run]
        return {run: Ruling(count, self._leave[run]) for run, count in self._granted.items()}

    def _turn(self, standing: Standing) -> float:
        """Rank of a run whose turn may be next: by bid, or by what it would have for its bid."""
        return -standing.bid if self._order == "bid" else self._share(standing, 1)

    def _share(self, standing: Standing, more: int = 0) -> float:
        return (self._granted[standing.run] + more) / _weight(standing)

    def _serve_least(self, standing: Standing) -> bool:
        """Grant all workers together without which the run pauses; False if they find no room."""
        if self._granted[standing.run] >= standing.least:
            return True
        before = deepcopy((self._free, self._kept, self._leave, self._granted))
        while self._granted[standing.run] < min(standing.least, len(standing.needs)):
            if not self._serve_next(standing, gangs=True):
                self._free, self._kept, self._leave, self._granted = before
                return False
        return True

    def _serve_next(self, standing: Standing, gangs: bool = False) -> bool:
        """Grant one more worker, on free room or on that of a lower bid; False if there is neither.

        Only what a run can't do without may take all leases of another one, which would come back for them otherwise.
        """
        count = self._granted[standing.run]
        if count >= len(standing.needs):
            return False
        offers = self._offers_for(Request(standing.needs[count], standing.bid, standing.bid))
        free = (offer for offer in offers if fits(offer.amounts, self._free[offer.node.id]))
        found = next(free, None) or self._take_spare(standing, offers)
        if found is None and gangs:
            found = self._take_gang(standing, offers)
        if found is None:
            return False
        self._free[found.node.id].subtract(found.amounts)
        self._granted[standing.run] += 1
        return True

    def _offers_for(self, request: Request) -> list[Offer]:
        """Offers of all nodes as if they were idle, the cheapest first."""
        if request not in self._offers:
            idle = [replace(node, free=node.total) for node in self._nodes]
            found = [answer for answer in answers(request, idle) if isinstance(answer, Offer)]
            self._offers[request] = sorted(found, key=lambda offer: offer.price)
        return self._offers[request]

    def _take_spare(self, by: Standing, offers: Sequence[Offer]) -> Offer | None:
        """Free room on one node by leases that others can spare: those of the lowest bid or largest share first."""
        taken: dict[str, list[tuple[Standing, Holding]]] = {}
        rank = self._share if self._order == "fair" else (lambda one: -one.bid)
        for victim in sorted(self._standings, key=rank, reverse=True):
            kept, spare = self._kept[victim.run], self._spare(victim, by)
            for held in reversed(kept[max(0, len(kept) - spare) :]):
                there = taken.setdefault(held.node, [])
                there.append((victim, held))
                if (offer := self._opened(offers, there)) is not None:
                    told = f"{by.run} bids {by.bid:g}, and this run {victim.bid:g}"
                    self._evict(there, told if self._order == "bid" else f"{told}, which has more than its share")
                    return offer
        return None

    def _spare(self, victim: Standing, by: Standing) -> int:
        """Number of leases that a run can spare for another: never one of its least."""
        granted = self._granted[victim.run]
        if self._order == "bid":
            beyond = granted if _outbids(by, victim) else 0
        else:
            beyond = math.ceil(granted - self._share(by, 1) * _weight(victim) - 1e-9)
        return max(0, min(beyond, granted - victim.least))

    def _take_gang(self, by: Standing, offers: Sequence[Offer]) -> Offer | None:
        """Free room on one node by all leases of one run that has yet to begin."""
        for victim in sorted(self._standings, key=lambda one: one.bid):
            yields = _outbids(by, victim) and not victim.begun
            gang = [(victim, held) for held in self._kept[victim.run]] if yields else []
            for node in {held.node: None for _, held in gang}:
                offer = self._opened(offers, [(run, held) for run, held in gang if held.node == node])
                if offer is not None:
                    self._evict(gang, f"{by.run} bids {by.bid:g}, and this run {victim.bid:g}")
                    return offer
        return None

    def _opened(self, offers: Sequence[Offer], leases: Sequence[tuple[Standing, Holding]]) -> Offer | None:
        """Offer of the node of these leases, if it has room without them."""
        node = leases[0][1].node
        freed = sum((Counter(held.amounts) for _, held in leases), Counter(self._free.get(node)))
        return next((offer for offer in offers if offer.node.id == node and fits(offer.amounts, freed)), None)

    def _evict(self, leases: Sequence[tuple[Standing, Holding]], reason: str) -> None:
        for victim, held in leases:
            self._kept[victim.run].remove(held)
            self._granted[victim.run] -= 1
            self._free[held.node].update(held.amounts)
            self._leave[victim.run][held.name] = reason


def _weight(standing: Standing) -> float:
    return max(standing.bid, 1e-9)


def _outbids(one: Standing, other: Standing) -> bool:
    return one.bid > other.bid and one.bid >= other.bid * OUTBID


def _age(held: Holding) -> tuple[float, str]:
    return held.since_s, held.name
