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

from hypha_ray.market.offers import LEASED, PRICING, Offer, Refusal, Request, answers, fits, least_bid
from hypha_ray.market.requirements import OWN_LABEL, RAY_LABEL, Need, NodeResources

LABELS = (*sorted(PRICING), OWN_LABEL, RAY_LABEL)
"""Labels on which the answer of a machine depends."""


@dataclass(frozen=True, slots=True, order=True)
class NodeOffer:
    """Room for one worker on a machine; the cheapest comes first, then the one that the cluster names first.

    Attributes:
        least_bid: least bid per hour that its owner takes.

    """

    price: float
    index: int
    node: str = field(compare=False)
    amounts: Mapping[str, float] = field(compare=False)
    least_bid: float = field(compare=False)


@dataclass(slots=True)
class _Rooms:
    """Rooms for one need: by node, and those that may still be free, in order."""

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
        ask: Callable[[Request, Sequence[NodeResources]], list[Offer | Refusal]] = answers,
    ) -> None:
        self._ask = ask
        self._free = {node.id: Counter(node.free) for node in nodes}
        self._rooms: dict[Need, _Rooms] = {}
        self._kinds: dict[Hashable, list[tuple[int, str]]] = {}
        self._examples: list[NodeResources] = []
        for index, node in enumerate(nodes):
            kind = _kind(node)
            if kind not in self._kinds:
                self._examples.append(replace(node, free=node.total))  # Asked as if it were idle.
            self._kinds.setdefault(kind, []).append((index, node.id))

    def free_room(self, need: Need, bid: float) -> NodeOffer | None:
        """The first room that is free for a bid."""
        rooms = self._rooms_for(need)
        full = set[int]()
        found = None
        for room in rooms.free:
            if room.least_bid > bid:
                continue
            if fits(room.amounts, self._free[room.node]):
                found = room
                break
            full.add(room.index)
        if full:
            rooms.free = [room for room in rooms.free if room.index not in full]
        return found

    def room_without(self, need: Need, bid: float, node: str, freed: Mapping[str, float]) -> NodeOffer | None:
        """Room on a node for a bid, once some amounts have come free there."""
        room = self._rooms_for(need).by_node.get(node)
        if room is None or room.least_bid > bid:
            return None
        free = self._free[node]
        lacks = (free[name] + freed.get(name, 0.0) < amount - 1e-4 for name, amount in room.amounts.items())
        return None if any(lacks) else room

    def take(self, room: NodeOffer) -> None:
        """Count a room as taken."""
        self._free[room.node].subtract(room.amounts)

    def take_back(self, node: str, amounts: Mapping[str, float]) -> None:
        """Count amounts on a node as taken, which had come free."""
        self._free.setdefault(node, Counter()).subtract(amounts)

    def give(self, node: str, amounts: Mapping[str, float]) -> None:
        """Count amounts on a node as free."""
        self._free.setdefault(node, Counter()).update(amounts)
        for rooms in self._rooms.values():
            room = rooms.by_node.get(node)
            if room is not None and not _has(rooms.free, room):
                insort(rooms.free, room)

    def _rooms_for(self, need: Need) -> _Rooms:
        if need not in self._rooms:
            found = sorted(self._offered(need))
            self._rooms[need] = _Rooms({room.node: room for room in found}, found)
        return self._rooms[need]

    def _offered(self, need: Need) -> Collection[NodeOffer]:
        """Rooms of all machines for a need, for any bid."""
        told = self._ask(Request(need, math.inf, math.inf), self._examples)
        found = list[NodeOffer]()
        for answer, places in zip(told, self._kinds.values(), strict=True):
            if isinstance(answer, Offer):
                least = least_bid(answer)
                found += [NodeOffer(answer.price, index, node, answer.amounts, least) for index, node in places]
        return found


def _has(rooms: Sequence[NodeOffer], room: NodeOffer) -> bool:
    """Whether a sorted list has a room."""
    at = bisect_left(rooms, room)
    return at < len(rooms) and rooms[at].index == room.index


def _kind(node: NodeResources) -> Hashable:
    """Kind of a machine: those of one kind answer alike."""
    return tuple(node.total.get(name) for name in LEASED), tuple(node.labels.get(label) for label in LABELS)
