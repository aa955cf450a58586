"""Selection among offers: the machines of a job, by price and strategy.

Offers for one need differ in price and rank only, so that choosing one lease after the other is exact: see `select`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

from hypha_ray.config.tables.resources import MarketStrategy
from hypha_ray.market.offers import Offer, Refusal, Request, answers
from hypha_ray.market.requirements import NodeResources
from hypha_ray.market.speeds import UNKNOWN, Speeds, worths

ROUNDING = 1e-9
"""Part by which a sum of prices may exceed its limit: they are sums of floats."""
Rank: TypeAlias = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference of a job among offers.

    Attributes:
        budget: highest sum of prices per hour.
        sites: sites that the job is on already, for ``near``.
        held: leases of the job by node id, for ``spread``.
        speeds: speeds of the job's workers, for ``value``.

    """

    strategy: MarketStrategy = "cheapest"
    budget: float = math.inf
    sites: Collection[str] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    speeds: Speeds = UNKNOWN


@dataclass(frozen=True, slots=True)
class Choice:
    """Leases chosen for one request, out of the answers of all nodes."""

    request: Request
    wanted: int
    answers: Sequence[Offer | Refusal]
    chosen: Sequence[Offer]
    """Offer of each lease; a node that gives several leases is there several times."""

    @property
    def price(self) -> float:
        """Sum of prices per hour."""
        return sum(offer.price for offer in self.chosen)


def select(offers: Sequence[Offer], wanted: int, preference: Preference) -> list[Offer]:
    """Choose as many of the wanted leases as the budget allows; among those sets, the first in order of rank.

    It begins with the cheapest set. In order of rank, each further lease takes the place of the dearest one that isn't
    confirmed yet, if the sum of prices allows that.
    """
    reserve = dict[tuple[int, int], float]()
    total = 0.0
    limit = max(0.0, preference.budget) * (1 + ROUNDING)  # What is free is taken, even if rounding left less than 0.
    for index, number in islice(_ranked(offers, lambda offer, _: (offer.price,)), wanted):
        if total + offers[index].price > limit:
            break
        reserve[index, number] = offers[index].price
        total += offers[index].price
    chosen: list[Offer] = []
    for index, number in _ranked(offers, _rank_of(offers, preference)):
        if not reserve:
            break
        if reserve.pop((index, number), None) is None:
            dearest = next(reversed(reserve))
            more = total - reserve[dearest] + offers[index].price
            if more > limit:
                continue
            total = more
            del reserve[dearest]
        chosen.append(offers[index])
    return chosen


def plan(
    requests: Sequence[tuple[Request, int]], nodes: Sequence[NodeResources], preference: Preference
) -> list[Choice]:
    """Choose machines for one request after the other, each with its number of leases; the first has most to choose."""
    left = list(nodes)
    found = list[Choice]()
    for request, wanted in requests:
        heard = [_measured(answer, request, preference.speeds) for answer in answers(request, left)]
        offers = [answer for answer in heard if isinstance(answer, Offer)]
        choice = Choice(request, wanted, heard, select(offers, wanted, preference))
        found.append(choice)
        taken = Counter(offer.node.id for offer in choice.chosen)
        amounts = {offer.node.id: offer.amounts for offer in choice.chosen}
        left = [without(node, amounts[node.id], taken[node.id]) if node.id in taken else node for node in left]
        preference = replace(preference, budget=preference.budget - choice.price, held=Counter(preference.held) + taken)
    return found


def _measured(answer: Offer | Refusal, request: Request, speeds: Speeds) -> Offer | Refusal:
    """An offer to a worker with the speed that was measured there."""
    if isinstance(answer, Refusal) or request.need.role != "worker":
        return answer
    return replace(answer, speed=speeds.of(answer.node, answer.amounts))


def without(node: NodeResources, amounts: Mapping[str, float], times: int) -> NodeResources:
    """The node as some leases of these amounts leave it."""
    free = {name: amount - times * amounts.get(name, 0.0) for name, amount in node.free.items()}
    return replace(node, free=free)


def _ranked(offers: Sequence[Offer], rank: Callable[[Offer, int], Rank]) -> Iterator[tuple[int, int]]:
    """Leases by rank, each as the index of its offer and its number on that node; ranks grow with that number."""
    heap = [(rank(offer, 0), index, 0) for index, offer in enumerate(offers)]
    heapq.heapify(heap)
    while heap:
        _, index, number = heap[0]
        yield index, number
        if number + 1 < offers[index].room:
            heapq.heapreplace(heap, (rank(offers[index], number + 1), index, number + 1))
        else:
            heapq.heappop(heap)


def _rank_of(offers: Sequence[Offer], preference: Preference) -> Callable[[Offer, int], Rank]:
    """Rank of a lease, less is better: of an offer, and of the number of leases that its node has given before."""
    sites = preference.sites
    held = preference.held
    stated = all(offer.terms.throughput for offer in offers)
    measured = any(offer.speed is not None for offer in offers)
    match preference.strategy:
        case "cheapest":
            return lambda offer, _: (offer.price,)
        case "value" if stated and not measured:
            return lambda offer, _: (offer.terms.price / (offer.terms.throughput or 1.0), offer.price)
        case "value":
            worth = {node: found.amount for node, found in worths(offers).items()}
            return lambda offer, _: (offer.price / worth[offer.node.id], offer.price)
        case "near":
            return lambda offer, _: (offer.terms.site not in sites, offer.price)
        case "spread":
            return lambda offer, number: (held.get(offer.node.id, 0) + number, offer.price)
