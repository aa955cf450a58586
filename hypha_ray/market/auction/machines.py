"""Machines of a cluster during one ruling of the auction: what they offer for each need, and what is free there.

Machines of one kind give the same answer, so each kind is asked once for each need. An offer whose machine is full
isn't looked at again until something comes free there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypha_ray.market.offers import LEASED, PRICING, LeaseRequest, Offer, Refusal, answers, fits, least_bid
from hypha_ray.market.requirements import OWN_LABEL, RAY_LABEL, Need, NodeResources

LABELS = (*sorted(PRICING), OWN_LABEL, RAY_LABEL)
"""Labels on which the answer of a machine depends."""


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
            kind = _kind(node)
            if kind not in self._kinds:
                self._examples.append(replace(node, free=node.total))  # Asked as if it were idle.
            self._kinds.setdefault(kind, []).append((index, node.id))

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
                least = least_bid(answer)
                for index, node in nodes:
                    offers.append(NodeOffer(answer.price, index, node, answer.amounts, least))
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
