"""Lines of a dry run about machines: offers and refusals where owners have terms, and the workers that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from hypha_ray.config import Job
from hypha_ray.market.buyer import choices, trades, workers_to_hire
from hypha_ray.market.leases import Offer
from hypha_ray.market.requirements import NodeResources, generator_need, generators_with_room, group_need
from hypha_ray.market.selection import UNKNOWN, Choice, Speeds, worths


def machine_lines(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> Iterator[str]:
    """Lines about the machines that a job would have now; the last one is of the whole job.

    Args:
        job: the job file.
        nodes: nodes of the cluster.
        home: id of the driver's node.
        speeds: measured speeds of the job's workers.

    Raises:
        CapacityError: there is no room for `min_workers`, after the lines that say why.

    """
    if trades(job.resources, nodes):
        by_value = job.resources.strategy == "value"
        all_choices = choices(job, nodes, home, speeds)
        for choice in all_choices:
            yield from _choice_lines(choice, by_value)
        price = _price_of(all_choices)
        if price is not None:
            yield f"price: {price:.2f} an hour"
    workers = workers_to_hire(job, nodes, home, speeds)
    yield from _group_lines(job, workers)
    if job.rl.generators:
        fitting = generators_with_room(job, nodes)
        yield f"generators with {generator_need(job)} each: {fitting} of {job.rl.generators} fit beside the workers"
    yield f"resources: {len(workers)} of {job.num_workers} workers fit; nodes: {len(nodes)}"


def hourly_price(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> float | None:
    """Price per hour of the machines that a job would have now; None if none of them has a price.

    The arguments are those of `machine_lines`.
    """
    if not trades(job.resources, nodes):
        return None
    return _price_of(choices(job, nodes, home, speeds))


def _price_of(all_choices: Sequence[Choice]) -> float | None:
    """Price per hour of chosen machines; None if no owner of them has named one."""
    has_price = False
    price = 0.0
    for choice in all_choices:
        if any(offer.terms.named_price for offer in choice.chosen):
            has_price = True
        price += choice.price
    if not has_price:
        return None
    return price


def _choice_lines(choice: Choice, by_value: bool) -> Iterator[str]:
    """The answer of each node to a request, the worth that its price is compared with, and the leases chosen there."""
    leases = Counter(offer.node.id for offer in choice.chosen)
    offers = [answer for answer in choice.answers if isinstance(answer, Offer)]
    worth = worths(offers) if by_value else {}
    request = choice.request
    yield f"offers for {choice.count} × {request.need.role} with {request.need}, bid {request.bid:g}:"
    for answer in choice.answers:
        node_id = answer.node.id
        node = f"  {answer.node.address} ({node_id[:8]})"
        if not isinstance(answer, Offer):
            yield f"{node}: refused, {answer.reason}"
            continue
        terms = [f"{answer.price:g} an hour each" if answer.terms.named_price else "no price"]
        if by_value:
            terms.append(f"for {worth[node_id]}")
        terms.append(f"room for {answer.capacity}")
        yield f"{node}: {', '.join(terms)}; {leases[node_id] or 'none'} chosen"


def _group_lines(job: Job, workers: Collection[int]) -> Iterator[str]:
    """Numbers, needs and fitting workers of each of the ``[[workers]]``."""
    first = 0
    for group in job.workers:
        last = first + group.count - 1
        numbers = f"workers {first} to {last}, each" if group.count > 1 else f"worker {first}"
        fitting = [worker for worker in workers if first <= worker <= last]
        yield f"{numbers} with {group_need(group)}: {len(fitting)} of {group.count} fit"
        first += group.count
