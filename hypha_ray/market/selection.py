"""Selection among offers: the machines of a job, by price and strategy, and speeds for the strategy ``value``.

Offers for one need differ in price and rank only, so that choosing one lease after the other is exact: see `select`.
A speed is in samples per second of one worker, as earlier runs have measured it. It belongs to a training, to the
amounts of a lease, and to a machine or a kind of GPU: see `training_key` and `places`.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median
from typing import TypeAlias

from hypha_ray.config import Job
from hypha_ray.config.tables.resources import MarketStrategy
from hypha_ray.market.offers import Offer, Refusal, Request, answers, share
from hypha_ray.market.requirements import GB, OWN_LABEL, RAY_LABEL, NodeResources

_SAVING = ("gradient_checkpointing", "fused_loss", "probe_batch_size")
_WORKER = ("device", "processes", "autocast", "compile", "attention", *_SAVING)
"""Keys of ``[worker]`` that a speed depends on."""


def training_key(job: Job, shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash of all that a worker's speed depends on, besides its machine; `shapes` are those of a sample's tensors."""
    told = [
        job.model.model_dump(mode="json", exclude={"token"}),
        job.worker.model_dump(mode="json", include=set(_WORKER)),
        [job.rounds.max_batch_size, job.rounds.accumulation, job.inner_optimizer.name],
        job.rl.model_dump(mode="json") if job.rl.algorithm is not None else None,
        [job.testing.batch_s, job.testing.batch_times_s, job.testing.slowdown],
        {name: list(shape) for name, shape in shapes.items()},
    ]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def places(node: NodeResources, amounts: Mapping[str, float]) -> list[str]:
    """Names under which the speed of a lease is kept: by its machine, and by its kind of GPU if it has GPUs."""
    gpus = amounts.get("GPU", 0.0)
    kind = node.labels.get(OWN_LABEL) or node.labels.get(RAY_LABEL)
    where = [node.id, kind] if gpus and kind else [node.id]
    return [f"{place}/{amounts.get('CPU', 0.0):g} CPU, {gpus:g} GPU" for place in where]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one training: samples per second by place."""

    known: Mapping[str, float] = field(default_factory=dict)

    def of(self, node: NodeResources, amounts: Mapping[str, float]) -> float | None:
        """Speed of a lease of these amounts; None if it was measured neither there nor on such a GPU."""
        return next((self.known[place] for place in places(node, amounts) if place in self.known), None)


UNKNOWN = Speeds()
"""Speeds of a training that has been on no machine yet."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Worth of a lease: an amount, and the unit and source of it."""

    amount: float
    basis: str

    def __str__(self) -> str:
        return f"{self.amount:.3g} {self.basis}"


def worths(offers: Sequence[Offer]) -> dict[str, Worth]:
    """Worth of a lease of each offer, by the node's id.

    A measured speed comes first. If only some are, the others are estimated: by the throughput that owners state if
    all do, otherwise by resources, at the median ratio of the measured ones.
    """
    stated = all(offer.terms.throughput for offer in offers)
    guesses = {
        offer.node.id: share(offer.amounts, offer.node) * (offer.terms.throughput or 0.0)
        if stated
        else _units(offer.amounts)
        for offer in offers
    }
    measured = {offer.node.id: offer.speed for offer in offers if offer.speed is not None}
    if not measured:
        basis = "of the stated throughput" if stated else "units of resources"
        return {node: Worth(guess, basis) for node, guess in guesses.items()}
    ratio = median(speed / guesses[node] for node, speed in measured.items())
    basis = f"samples/s, estimated from {'the stated throughput' if stated else 'resources'}"
    return {
        node: Worth(measured[node], "samples/s, measured") if node in measured else Worth(ratio * guess, basis)
        for node, guess in guesses.items()
    }


def _units(amounts: Mapping[str, float]) -> float:
    """Worth of resources whose speed isn't known: a GPU counts as 25 CPUs, and a GB of memory as a tenth of one."""
    return 25 * amounts.get("GPU", 0.0) + amounts.get("CPU", 0.0) + 0.1 * amounts.get("memory", 0.0) / GB


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
