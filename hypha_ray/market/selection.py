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
from hypha_ray.config.resources import MarketStrategy
from hypha_ray.market.leases import LeaseRequest, Offer, Refusal, answers, share
from hypha_ray.market.requirements import GB, OWN_LABEL, RAY_LABEL, NodeResources

_SAVING = ("gradient_checkpointing", "fused_loss", "probe_batch_size")
_WORKER = ("device", "processes", "autocast", "compile", "attention", *_SAVING)
"""Keys of ``[worker]`` that a speed depends on."""
ROUNDING = 1e-9
"""Part by which a sum of prices may exceed its limit: they are sums of floats."""
Rank: TypeAlias = tuple[float, ...]


def training_key(job: Job, shapes: Mapping[str, Sequence[int]]) -> str:
    """Hash of all that a worker's speed depends on, besides its machine; `shapes` are those of a sample's tensors."""
    rl = None
    if job.rl.algorithm is not None:
        rl = job.rl.model_dump(mode="json")
    elif job.preference.loss is not None:
        rl = job.preference.model_dump(mode="json", include={"loss", "reference"})
    facts = [
        job.model.model_dump(mode="json", exclude={"token"}),
        job.worker.model_dump(mode="json", include=set(_WORKER)),
        [job.rounds.max_batch_size, job.rounds.accumulation, job.inner_optimizer.name],
        rl,
        [job.testing.batch_s, job.testing.batch_times_s, job.testing.slowdown],
        {name: list(shape) for name, shape in shapes.items()},
    ]
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def places(node: NodeResources, amounts: Mapping[str, float]) -> list[str]:
    """Names under which the speed of a lease is kept: by its machine, and by its kind of GPU if it has GPUs."""
    cpus = amounts.get("CPU", 0.0)
    gpus = amounts.get("GPU", 0.0)
    lease = f"{cpus:g} CPU, {gpus:g} GPU"
    names = [f"{node.id}/{lease}"]
    gpu_type = node.labels.get(OWN_LABEL) or node.labels.get(RAY_LABEL)
    if gpus and gpu_type:
        names.append(f"{gpu_type}/{lease}")
    return names


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one training: samples per second by place."""

    by_place: Mapping[str, float] = field(default_factory=dict)

    def of(self, node: NodeResources, amounts: Mapping[str, float]) -> float | None:
        """Speed of a lease of these amounts; None if it was measured neither on that node nor on such a GPU."""
        for name in places(node, amounts):
            if name in self.by_place:
                return self.by_place[name]
        return None


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
    all_stated = _all_state_throughput(offers)
    guesses = {}
    measured_speeds = {}
    for offer in offers:
        if all_stated:
            guesses[offer.node.id] = share(offer.amounts, offer.node) * (offer.terms.throughput or 0.0)
        else:
            guesses[offer.node.id] = _units(offer.amounts)
        if offer.speed is not None:
            measured_speeds[offer.node.id] = offer.speed
    if not measured_speeds:
        basis = "of the stated throughput" if all_stated else "units of resources"
        return {node: Worth(guess, basis) for node, guess in guesses.items()}
    ratio = median(speed / guesses[node] for node, speed in measured_speeds.items())
    source = "the stated throughput" if all_stated else "resources"
    worth_by_node = {}
    for node, guess in guesses.items():
        if node in measured_speeds:
            worth_by_node[node] = Worth(measured_speeds[node], "samples/s, measured")
        else:
            worth_by_node[node] = Worth(ratio * guess, f"samples/s, estimated from {source}")
    return worth_by_node


def _all_state_throughput(offers: Sequence[Offer]) -> bool:
    return all(offer.terms.throughput for offer in offers)


def _units(amounts: Mapping[str, float]) -> float:
    """Worth of resources whose speed isn't known: a GPU counts as 25 CPUs, and a GB of memory as a tenth of one."""
    gpus = amounts.get("GPU", 0.0)
    cpus = amounts.get("CPU", 0.0)
    memory_bytes = amounts.get("memory", 0.0)
    return 25 * gpus + cpus + 0.1 * memory_bytes / GB


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference of a job among offers.

    Attributes:
        budget: highest sum of prices per hour.
        sites: sites that the job is on already, for ``near``.
        leases_by_node: number of the job's leases by node id, for ``spread``.
        speeds: speeds of the job's workers, for ``value``.

    """

    strategy: MarketStrategy = "cheapest"
    budget: float = math.inf
    sites: Collection[str] = ()
    leases_by_node: Mapping[str, int] = field(default_factory=dict)
    speeds: Speeds = UNKNOWN


@dataclass(frozen=True, slots=True)
class Choice:
    """Leases chosen for one request, out of the answers of all nodes."""

    request: LeaseRequest
    count: int
    """Number of leases that are needed."""
    answers: Sequence[Offer | Refusal]
    chosen: Sequence[Offer]
    """Offer of each lease; a node that gives several leases is there several times."""

    @property
    def price(self) -> float:
        """Sum of prices per hour."""
        return sum(offer.price for offer in self.chosen)


def select(offers: Sequence[Offer], count: int, preference: Preference) -> list[Offer]:
    """Choose up to `count` leases, as many as the budget allows; among such sets, the first in order of rank.

    It begins with the cheapest set. In order of rank, each further lease takes the place of the dearest one that isn't
    confirmed yet, if the sum of prices allows that.
    """
    reserve = dict[tuple[int, int], float]()
    total = 0.0
    limit = max(0.0, preference.budget) * (1 + ROUNDING)  # What is free is taken, even if rounding left less than 0.
    for index, number in islice(_ranked(offers, lambda offer, _: (offer.price,)), count):
        if total + offers[index].price > limit:
            break
        reserve[index, number] = offers[index].price
        total += offers[index].price
    chosen_offers: list[Offer] = []
    for index, number in _ranked(offers, _rank_of(offers, preference)):
        if not reserve:
            break
        if reserve.pop((index, number), None) is None:
            dearest = next(reversed(reserve))
            new_total = total - reserve[dearest] + offers[index].price
            if new_total > limit:
                continue
            total = new_total
            del reserve[dearest]
        chosen_offers.append(offers[index])
    return chosen_offers


def choose_machines(
    requests: Sequence[tuple[LeaseRequest, int]], nodes: Sequence[NodeResources], preference: Preference
) -> list[Choice]:
    """Choose machines for one request after the other, each with its number of leases; the first has most to choose."""
    candidates = list(nodes)
    choices = list[Choice]()
    for request, count in requests:
        offers = []
        node_answers: list[Offer | Refusal] = []
        for answer in answers(request, candidates):
            if isinstance(answer, Refusal):
                node_answers.append(answer)
                continue
            offer = _with_measured_speed(answer, request, preference.speeds)
            offers.append(offer)
            node_answers.append(offer)
        choice = Choice(request, count, node_answers, select(offers, count, preference))
        choices.append(choice)
        leases_by_node = Counter[str]()
        amounts = {}
        for offer in choice.chosen:
            leases_by_node[offer.node.id] += 1
            amounts[offer.node.id] = offer.amounts
        for index, node in enumerate(candidates):
            if node.id in leases_by_node:
                candidates[index] = without(node, amounts[node.id], leases_by_node[node.id])
        preference = replace(
            preference,
            budget=preference.budget - choice.price,
            leases_by_node=Counter(preference.leases_by_node) + leases_by_node,
        )
    return choices


def _with_measured_speed(offer: Offer, request: LeaseRequest, speeds: Speeds) -> Offer:
    """An offer to a worker with the speed that was measured there; one to a server as it is."""
    if request.need.role != "worker":
        return offer
    return replace(offer, speed=speeds.of(offer.node, offer.amounts))


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
        if number + 1 < offers[index].capacity:
            heapq.heapreplace(heap, (rank(offers[index], number + 1), index, number + 1))
        else:
            heapq.heappop(heap)


def _rank_of(offers: Sequence[Offer], preference: Preference) -> Callable[[Offer, int], Rank]:
    """Rank of a lease, less is better: of an offer, and of the number of leases that its node has given before."""
    sites = preference.sites
    leases_by_node = preference.leases_by_node
    all_stated = _all_state_throughput(offers)
    any_measured = any(offer.speed is not None for offer in offers)
    match preference.strategy:
        case "cheapest":
            return lambda offer, _: (offer.price,)
        case "value" if all_stated and not any_measured:
            return lambda offer, _: (offer.terms.price / (offer.terms.throughput or 1.0), offer.price)
        case "value":
            amounts = {node: worth.amount for node, worth in worths(offers).items()}
            return lambda offer, _: (offer.price / amounts[offer.node.id], offer.price)
        case "near":
            return lambda offer, _: (offer.terms.site not in sites, offer.price)
        case "spread":
            return lambda offer, number: (leases_by_node.get(offer.node.id, 0) + number, offer.price)
