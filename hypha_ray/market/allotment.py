"""Allotment of a cluster's room: how many workers each of several competing runs may hold.

    standings of runs, Ray's table of leases, nodes ──► allot ──► for each run: a quota, and leases to hand back

It never leases anything: Ray's table of placement groups is the only account of what is taken, and a run makes its own
groups. So nothing is granted twice, and a new auction knows everything once each run has called again.

Machines of a cluster during one ruling of the auction: what they offer for each need, and what is free there.

Machines of one kind give the same answer, so each kind is asked once for each need. An offer whose machine is full
isn't looked at again until something comes free there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeAlias

from hypha_ray.market.leases import LEASED, PRICING, LeaseRequest, Offer, Refusal, answers, fits, least_bid
from hypha_ray.market.requirements import OWN_LABEL, RAY_LABEL, Need, NodeResources

LABELS = (*sorted(PRICING), OWN_LABEL, RAY_LABEL)
"""Labels on which the answer of a machine depends."""
Order: TypeAlias = Literal["bid", "fair"]
OUTBID = 1.1
"""Least ratio of two bids at which the higher one takes a lease away."""


@dataclass(frozen=True, slots=True, order=True)
class NodeOffer:
    """Offer of a machine to one worker; the cheapest comes first, then the one that the cluster names first.

    Attributes:
        least_bid: least bid per hour that its owner takes.

    """

    price: float
    index: int
    node: str = field(compare=False)
    amounts: Mapping[str, float] = field(compare=False)
    least_bid: float = field(compare=False)


@dataclass(slots=True)
class _OffersForNeed:
    """Offers for one need: by node, and those that may still be free, in order."""

    by_node: dict[str, NodeOffer]
    free: list[NodeOffer]


class NodeOffers:
    """Offers and free amounts of the nodes.

    Args:
        nodes: nodes, with what is free there.
        ask: answers of nodes to a request.

    """

    def __init__(
        self,
        nodes: Sequence[NodeResources],
        ask: Callable[[LeaseRequest, Sequence[NodeResources]], list[Offer | Refusal]] = answers,
    ) -> None:
        self._ask = ask
        self._free = {node.id: Counter(node.free) for node in nodes}
        self._offers: dict[Need, _OffersForNeed] = {}
        self._kinds: dict[Hashable, list[tuple[int, str]]] = {}
        self._examples: list[NodeResources] = []
        for index, node in enumerate(nodes):
            node_kind = _kind(node)
            if node_kind not in self._kinds:
                self._examples.append(replace(node, free=node.total))  # Asked as if it were idle.
            self._kinds.setdefault(node_kind, []).append((index, node.id))

    def free_offer(self, need: Need, bid: float) -> NodeOffer | None:
        """The first offer that is free for a bid."""
        offers = self._offers_for(need)
        full = set[int]()
        free_offer = None
        for offer in offers.free:
            if offer.least_bid > bid:
                continue
            if fits(offer.amounts, self._free[offer.node]):
                free_offer = offer
                break
            full.add(offer.index)
        if full:
            offers.free = [offer for offer in offers.free if offer.index not in full]
        return free_offer

    def offer_with(self, need: Need, bid: float, node: str, freed: Mapping[str, float]) -> NodeOffer | None:
        """Offer of a node for a bid, once some amounts have come free there."""
        offer = self._offers_for(need).by_node.get(node)
        if offer is None or offer.least_bid > bid:
            return None
        free = self._free[node]
        for name, amount in offer.amounts.items():
            if free[name] + freed.get(name, 0.0) < amount - 1e-4:
                return None
        return offer

    def take(self, offer: NodeOffer) -> None:
        """Count the amounts of an offer as taken."""
        self._free[offer.node].subtract(offer.amounts)

    def take_back(self, node: str, amounts: Mapping[str, float]) -> None:
        """Count amounts on a node as taken, which had come free."""
        self._free.setdefault(node, Counter()).subtract(amounts)

    def give(self, node: str, amounts: Mapping[str, float]) -> None:
        """Count amounts on a node as free."""
        self._free.setdefault(node, Counter()).update(amounts)
        for offers in self._offers.values():
            offer = offers.by_node.get(node)
            if offer is not None and not _has(offers.free, offer):
                insort(offers.free, offer)

    def _offers_for(self, need: Need) -> _OffersForNeed:
        if need not in self._offers:
            offers = sorted(self._node_offers(need))
            self._offers[need] = _OffersForNeed({offer.node: offer for offer in offers}, offers)
        return self._offers[need]

    def _node_offers(self, need: Need) -> Collection[NodeOffer]:
        """Offers of all machines for a need, for any bid."""
        kind_answers = self._ask(LeaseRequest(need, math.inf, math.inf), self._examples)
        offers = list[NodeOffer]()
        for answer, nodes in zip(kind_answers, self._kinds.values(), strict=True):
            if isinstance(answer, Offer):
                lowest_bid = least_bid(answer)
                for index, node in nodes:
                    offers.append(NodeOffer(answer.price, index, node, answer.amounts, lowest_bid))
        return offers


def _has(offers: Sequence[NodeOffer], offer: NodeOffer) -> bool:
    """Whether a sorted list has an offer."""
    index = bisect_left(offers, offer)
    return index < len(offers) and offers[index].index == offer.index


def _kind(node: NodeResources) -> Hashable:
    """Kind of a machine: those of one kind answer alike."""
    amounts = tuple(map(node.total.get, LEASED))
    labels = tuple(map(node.labels.get, LABELS))
    return amounts, labels


Grant: TypeAlias = tuple[Need, NodeOffer]
"""Need of a worker, and the offer that satisfies it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Standing of a run: its bid, needs of all workers that it wants, and number of those without which it pauses.

    Attributes:
        needs: need of each worker.
        begun: whether it has committed a round with them; until then, it may have to give way with all of them.
        numbers: number of each worker, in the order of their needs; empty: 0, 1, 2 and so on.
        since_s: times by name since which the run has leases, for those of which Ray's table doesn't say it.

    """

    run: str
    bid: float
    needs: tuple[Need, ...]
    least: int
    begun: bool = True
    numbers: tuple[int, ...] = ()
    since_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def needs_by_name(self) -> dict[str, Need]:
        """Need of each worker by the name of its lease."""
        numbers = self.numbers or range(len(self.needs))
        return {f"worker-{number}": need for number, need in zip(numbers, self.needs, strict=True)}


@dataclass(frozen=True, slots=True)
class Holding:
    """Lease that a run has for a worker, since a time that only orders leases of one run."""

    name: str
    node: str
    amounts: Mapping[str, float]
    since_s: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """Ruling on a run: number of workers that it may hold, and names of leases to hand back, each with the reason.

    Attributes:
        needs: number of workers of each need among those that it may hold; None: of any need.
        behind: run that comes before it and waits for its least workers; None without one.

    """

    quota: int
    leave: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[Need, int] | None = field(default=None, compare=False)
    behind: str | None = field(default=None, compare=False)

    def allows(self, need: Need, workers: Mapping[Need, int]) -> bool:
        """Whether the run may hold one more worker of a need beside those that it holds or has been allowed."""
        within_needs = self.needs is None or workers.get(need, 0) < self.needs.get(need, 0)
        return within_needs and sum(workers.values()) < self.quota


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
        self._order = order
        self._machines = NodeOffers(nodes)
        self._standings = standings
        self._kept: dict[str, list[Holding]] = {}
        """Leases that each run keeps, the oldest first."""
        self._granted: dict[str, int] = {}
        """Number of workers that each run may hold."""
        self._needs: dict[str, dict[str, Need]] = {}
        """Needs of each run's workers by the names of their leases."""
        self._missing: dict[str, Counter[Need]] = {}
        """Number of workers of each run and need that have no lease and aren't granted one."""
        self._leave: dict[str, dict[str, str]] = {}
        """Reasons by name of the leases that each run is to hand back."""
        self._undo: list[Callable[[], None]] = []
        """Steps that take back grants and evictions, the latest at the end."""
        for standing in standings:
            run = standing.run
            leases = sorted(holdings.get(run, ()), key=_age)
            self._kept[run] = leases
            self._granted[run] = len(leases)
            self._needs[run] = standing.needs_by_name
            self._missing[run] = self._needs_without_lease(standing)
            self._leave[run] = {}

    def rulings(self) -> dict[str, Ruling]:
        """Serve all runs: first with what they can't do without, the highest bid in front; then with the rest."""
        growing: dict[str, Standing] = {}
        behind: dict[str, str] = {}
        by_bid = sorted(self._standings, key=lambda standing: -standing.bid)
        for turn, standing in enumerate(by_bid):
            if not self._serve_least(standing):
                for lower in by_bid[turn + 1 :]:
                    behind[lower.run] = standing.run
                break  # A run that bids less takes no room that this one waits for.
            growing[standing.run] = standing
        while growing:
            standing = min(growing.values(), key=self._turn)
            if not self._serve_next(standing):
                del growing[standing.run]
        rulings = {}
        for standing in self._standings:
            rulings[standing.run] = self._ruling(standing, behind.get(standing.run))
        return rulings

    def _ruling(self, standing: Standing, behind: str | None) -> Ruling:
        run = standing.run
        missing = self._missing[run]
        may_hold = {}
        for need, count in Counter(standing.needs).items():
            may_hold[need] = count - missing[need]
        return Ruling(self._granted[run], self._leave[run], may_hold, behind)

    def _needs_without_lease(self, standing: Standing) -> Counter[Need]:
        needs = self._needs[standing.run]
        missing = Counter(standing.needs)
        missing.subtract(needs[lease.name] for lease in self._kept[standing.run] if lease.name in needs)
        return missing

    def _turn(self, standing: Standing) -> float:
        """Rank of a run whose turn may be next: by bid, or by what it would have for its bid."""
        return -standing.bid if self._order == "bid" else self._share(standing, 1)

    def _share(self, standing: Standing, more_leases: int = 0) -> float:
        return (self._granted[standing.run] + more_leases) / _weight(standing)

    def _serve_least(self, standing: Standing) -> bool:
        """Grant all workers together without which the run pauses; False if they find no room."""
        if self._granted[standing.run] >= standing.least:
            return True
        self._undo.clear()
        while self._granted[standing.run] < min(standing.least, len(standing.needs)):
            if not self._serve_next(standing, takes_gangs=True):
                while self._undo:
                    self._undo.pop()()
                return False
        return True

    def _serve_next(self, standing: Standing, takes_gangs: bool = False) -> bool:
        """Grant one more worker, on free room or on that of a lower bid; False if there is neither.

        Only for its least workers may a run take all leases of another one, which would come back for them otherwise.
        """
        if self._granted[standing.run] >= len(standing.needs):
            return False
        needs = [need for need, count in self._missing[standing.run].items() if count > 0]
        grant = self._free_grant(standing, needs) or self._take_spare(standing, needs)
        if grant is None and takes_gangs:
            grant = self._take_gang(standing, needs)
        if grant is None:
            return False
        self._grant(standing.run, *grant)
        return True

    def _free_grant(self, standing: Standing, needs: Sequence[Need]) -> Grant | None:
        for need in needs:
            offer = self._machines.free_offer(need, standing.bid)
            if offer is not None:
                return need, offer
        return None

    def _grant(self, run: str, need: Need, offer: NodeOffer) -> None:
        self._machines.take(offer)
        self._granted[run] += 1
        self._missing[run][need] -= 1
        self._undo.append(partial(self._take_back, run, need, offer))

    def _take_back(self, run: str, need: Need, offer: NodeOffer) -> None:
        self._machines.give(offer.node, offer.amounts)
        self._granted[run] -= 1
        self._missing[run][need] += 1

    def _take_spare(self, taker: Standing, needs: Sequence[Need]) -> Grant | None:
        """Free room on one node by leases that others can spare: those of the lowest bid or largest share first."""
        taken_leases: dict[str, list[tuple[Standing, Holding]]] = {}
        freed: dict[str, Counter[str]] = {}
        rank = self._share if self._order == "fair" else (lambda standing: -standing.bid)
        for victim in sorted(self._standings, key=rank, reverse=True):
            leases = self._kept[victim.run]
            spare_count = self._spare(victim, taker)
            for lease in reversed(leases[max(0, len(leases) - spare_count) :]):
                taken_there = taken_leases.setdefault(lease.node, [])
                taken_there.append((victim, lease))
                freed_there = freed.setdefault(lease.node, Counter())
                freed_there.update(lease.amounts)
                grant = self._grant_after(taker, needs, lease.node, freed_there)
                if grant is not None:
                    reason = f"{taker.run} bids {taker.bid:g}, and this run {victim.bid:g}"
                    if self._order == "fair":
                        reason += ", which has more than its share"
                    self._evict(taken_there, reason)
                    return grant
        return None

    def _spare(self, victim: Standing, taker: Standing) -> int:
        """Number of leases that a run can spare for another: never one of its least."""
        granted_count = self._granted[victim.run]
        if self._order == "bid":
            spare_leases = granted_count if _outbids(taker, victim) else 0
        else:
            spare_leases = math.ceil(granted_count - self._share(taker, 1) * _weight(victim) - 1e-9)
        return max(0, min(spare_leases, granted_count - victim.least))

    def _take_gang(self, taker: Standing, needs: Sequence[Need]) -> Grant | None:
        """Free room on one node by all leases of one run that has yet to begin."""
        for victim in sorted(self._standings, key=lambda standing: standing.bid):
            yields = _outbids(taker, victim) and not victim.begun
            if not yields:
                continue
            gang = [(victim, lease) for lease in self._kept[victim.run]]
            freed: dict[str, Counter[str]] = {}
            for _, lease in gang:
                freed.setdefault(lease.node, Counter()).update(lease.amounts)
            for node, amounts in freed.items():
                grant = self._grant_after(taker, needs, node, amounts)
                if grant is not None:
                    self._evict(gang, f"{taker.run} bids {taker.bid:g}, and this run {victim.bid:g}")
                    return grant
        return None

    def _grant_after(
        self, taker: Standing, needs: Sequence[Need], node: str, freed: Mapping[str, float]
    ) -> Grant | None:
        """Offer of a node for one of the needs, once these amounts come free."""
        for need in needs:
            offer = self._machines.offer_with(need, taker.bid, node, freed)
            if offer is not None:
                return need, offer
        return None

    def _evict(self, leases: Sequence[tuple[Standing, Holding]], reason: str) -> None:
        for victim, lease in leases:
            run = victim.run
            need = self._needs[run].get(lease.name)
            self._undo.append(partial(self._undo_eviction, run, lease, self._kept[run].index(lease)))
            self._kept[run].remove(lease)
            self._granted[run] -= 1
            self._machines.give(lease.node, lease.amounts)
            self._leave[run][lease.name] = reason
            if need is not None:
                self._missing[run][need] += 1

    def _undo_eviction(self, run: str, lease: Holding, index: int) -> None:
        need = self._needs[run].get(lease.name)
        self._kept[run].insert(index, lease)
        self._granted[run] += 1
        self._machines.take_back(lease.node, lease.amounts)
        del self._leave[run][lease.name]
        if need is not None:
            self._missing[run][need] -= 1


def _weight(standing: Standing) -> float:
    return max(standing.bid, 1e-9)


def _outbids(bidder: Standing, victim: Standing) -> bool:
    return bidder.bid > victim.bid and bidder.bid >= victim.bid * OUTBID


def _age(lease: Holding) -> tuple[float, int, str]:
    """Rank of a lease by its age; of leases of one time, the highest number counts as the latest."""
    return lease.since_s, len(lease.name), lease.name
