"""Lines of a dry run about machines: offers and refusals where owners have terms, and the workers that fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from hypha_ray.config import Job
from hypha_ray.market.buyer import choices, trades, workers_to_hire
from hypha_ray.market.offers import Offer
from hypha_ray.market.requirements import NodeResources, group_need
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
        found = choices(job, nodes, home, speeds)
        for choice in found:
            yield from _choice_lines(choice, job.resources.strategy == "value")
        if any(offer.terms.named_price for choice in found for offer in choice.chosen):
            yield f"price: {sum(choice.price for choice in found):.2f} an hour"
    workers = workers_to_hire(job, nodes, home, speeds)
    yield from _group_lines(job, workers)
    yield f"resources: {len(workers)} of {job.num_workers} workers fit; nodes: {len(nodes)}"


def _choice_lines(choice: Choice, by_worth: bool) -> Iterator[str]:
    """The answer of each node to a request, the worth that its price is held against, and the leases chosen there."""
    taken = Counter(offer.node.id for offer in choice.chosen)
    offers = [answer for answer in choice.answers if isinstance(answer, Offer)]
    worth = worths(offers) if by_worth else {}
    request = choice.request
    yield f"offers for {choice.wanted} × {request.need.role} with {request.need}, bid {request.bid:g}:"
    for answer in choice.answers:
        node = f"  {answer.node.address} ({answer.node.id[:8]})"
        if isinstance(answer, Offer):
            price = f"{answer.price:g} an hour each" if answer.terms.named_price else "no price"
            told = [price, *([f"for {worth[answer.node.id]}"] if by_worth else []), f"room for {answer.room}"]
            yield f"{node}: {', '.join(told)}; {taken[answer.node.id] or 'none'} chosen"
        else:
            yield f"{node}: refused, {answer.reason}"


def _group_lines(job: Job, workers: Collection[int]) -> Iterator[str]:
    """Numbers, needs and fitting workers of each of the ``[[workers]]``."""
    first = 0
    for group in job.workers:
        last = first + group.count - 1
        numbers = f"workers {first} to {last}, each" if group.count > 1 else f"worker {first}"
        fitting = sum(first <= worker <= last for worker in workers)
        yield f"{numbers} with {group_need(group)}: {fitting} of {group.count} fit"
        first += group.count
