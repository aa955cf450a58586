"""Workers that a job can hire now: those that find room, on terms of owners that the job accepts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from hypha_ray.config import Job
from hypha_ray.config.tables.resources import Resources
from hypha_ray.errors import CapacityError
from hypha_ray.market.offers import Offer, Refusal, Request
from hypha_ray.market.requirements import Need, NodeResources, group_need, server_need, workers_to_start
from hypha_ray.market.selection import Choice, Preference, plan
from hypha_ray.market.speeds import UNKNOWN, Speeds
from hypha_ray.market.terms import SITE, are_posted


def trades(resources: Resources, nodes: Sequence[NodeResources]) -> bool:
    """Whether machines are chosen by owners' terms or by a strategy; otherwise Ray packs them."""
    return resources.strategy != "cheapest" or any(are_posted(node.labels) for node in nodes)


def request_of(resources: Resources, need: Need) -> Request:
    """Request for leases of one need, at the job's price for its role."""
    price = resources.parameter_server_price if need.role == "server" else resources.worker_price
    return Request(need, price.public_bid, price.max)


def choices(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> list[Choice]:
    """Machines that a job would choose now: parameter servers first, then each group of workers."""
    wanted = [(server_need(job), job.sync.fragments)]
    wanted += [(group_need(group), group.count) for group in job.worker_groups]
    leased = [(request_of(job.resources, need), count) for need, count in wanted if need.bundle()]
    return plan(leased, nodes, preference(job.resources, sites(nodes, {home}), speeds))


def sites(nodes: Sequence[NodeResources], ids: Collection[str]) -> set[str]:
    """Sites of the nodes with these ids."""
    return {node.labels[SITE] for node in nodes if SITE in node.labels and node.id in ids}


def preference(resources: Resources, near: Collection[str], speeds: Speeds, spent: float = 0.0) -> Preference:
    """Preference of a job that pays `spent` per hour already."""
    limit = resources.max_price_per_hour
    return Preference(resources.strategy, math.inf if limit is None else limit - spent, near, speeds=speeds)


def workers_to_hire(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> list[int]:
    """Numbers of the workers that find room now, and on terms that the job accepts.

    Args:
        job: the job file.
        nodes: nodes of the cluster.
        home: id of the scheduler's node.
        speeds: speeds of the job's workers.

    Raises:
        CapacityError: there are fewer than `min_workers`.

    """
    fitting = workers_to_start(job, nodes)
    if not trades(job.resources, nodes):
        return fitting
    found = choices(job, nodes, home, speeds)
    room = Counter({choice.request.need: 0 for choice in found})
    for choice in found:
        room[choice.request.need] += len(choice.chosen)
    _require_servers(job, found)
    numbers = list[int]()
    first = 0
    for group in job.worker_groups:
        need = group_need(group)
        count = min(group.count, room[need]) if need.bundle() else group.count
        room[need] -= count
        numbers += range(first, first + count)
        first += group.count
    least = min(job.resources.min_workers, job.num_workers)
    if len(numbers) < least:
        raise too_few([choice for choice in found if choice.request.need.role == "worker"], len(numbers), least)
    return numbers


def _require_servers(job: Job, found: Sequence[Choice]) -> None:
    servers = [choice for choice in found if choice.request.need.role == "server"]
    if servers and (count := len(servers[0].chosen)) < job.sync.fragments:
        raise too_few(servers, count, job.sync.fragments)


def too_few(found: Sequence[Choice], count: int, least: int) -> CapacityError:
    """The reason that only `count` leases of one role are to be had on terms that the job accepts."""
    short = next(choice for choice in found if len(choice.chosen) < choice.wanted)
    refusals = [answer for answer in short.answers if isinstance(answer, Refusal)]
    role = short.request.need.role
    asks = [refusal.ask for refusal in refusals if refusal.ask is not None]
    key = "parameter_server_price" if role == "server" else "worker_price"
    if sum(answer.room for answer in short.answers if isinstance(answer, Offer)) > len(short.chosen):
        what = f"resources.max_price_per_hour pays for {count} of {least} {role}s"
        return CapacityError("CFG004", what, fix="raise it, or wait for cheaper nodes")
    if asks:
        what = "no further node is cheap enough" if count else "no node is cheap enough"
        got = f"{min(asks):g} per hour at the cheapest"
        allowed = f"{short.request.max_price:g}"
        return CapacityError("CFG004", what, got, allowed, fix=f"raise resources.{key}.max, or wait for cheaper nodes")
    why = f"{refusals[0].node.address} is refused: {refusals[0].reason}" if refusals else "no node has room"
    what = f"owners' terms leave {count} of {least} {role}s"
    return CapacityError("CFG004", what, got=why, fix=f"see --dry-run; raise resources.{key}.bid, or add nodes")
