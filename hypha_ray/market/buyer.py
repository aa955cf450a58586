"""Workers that a job can hire now, and the buyer of a run, which chooses machines on their owners' terms.

    choose ──► begin ──► ending: the owner wants the machine back; the actor leaves ──► end
       └─────► fail: Ray had no room after all, and the node is left out for a while

Without terms in the cluster the buyer isn't asked, and nothing costs anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace

from hypha_ray.config import Job
from hypha_ray.config.tables.resources import Resources
from hypha_ray.errors import CapacityError
from hypha_ray.market.offers import SITE, Offer, Refusal, Request, are_posted, read_terms, share
from hypha_ray.market.requirements import Need, NodeResources, group_need, server_need, workers_to_start
from hypha_ray.market.selection import UNKNOWN, Choice, Preference, Speeds, plan, without


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


LEFT_OUT_S = 10.0
"""Seconds for which a node is left out that offered room and didn't give it."""
GRACE_S = 30.0
"""Longest time in seconds that an actor has to leave a machine; half of the longest lease if that is shorter."""
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """Terms on which a lease was made: id of the node, bid and price per hour, and the lease's beginning.

    Attributes:
        price: None if the owner has named none.
        since_s: monotonic time, of the machine that the run's schedulers are on.

    """

    node: str
    role: str
    amounts: Mapping[str, float]
    bid: float
    price: float | None
    since_s: float


@dataclass(frozen=True, slots=True)
class _Notice:
    """Notice to leave: the reason, and the monotonic time at which the lease ends."""

    reason: str
    end_s: float


class Buyer:
    """Chooses machines for the leases of one run.

    Args:
        resources: the job's prices, strategy and limit.

    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self.speeds = UNKNOWN
        self._agreed: dict[str, Agreement] = {}
        """Agreement of each lease by its name."""
        self._left_out: dict[str, float] = {}
        """Monotonic time by node id until which the node is left out."""
        self._notices: dict[str, _Notice] = {}
        """Notice to each lease whose end is near."""
        self._billed_s: dict[str, float] = {}
        """Monotonic time up to which each lease is billed."""
        self._owed: float | None = None
        """Cost of time that isn't billed yet, of leases that are over; None before the first lease with a price."""

    def choose(
        self,
        wanted: Mapping[str, Need],
        nodes: Sequence[NodeResources],
        home: str,
        placed: Container[str],
        now: float,
    ) -> dict[str, Offer]:
        """Agree on an offer for each name; a name that finds none isn't in the result.

        Args:
            wanted: needs by name of the lease.
            nodes: nodes of the cluster.
            home: id of the scheduler's node.
            placed: names of leases that the nodes' free amounts are without.
            now: monotonic time in seconds.

        """
        free = [self._as_left(node, placed) for node in nodes if self._left_out.get(node.id, now) <= now]
        names: dict[Need, list[str]] = {}
        for name, need in sorted(wanted.items(), key=lambda one: one[1].role == "worker"):  # Servers come first.
            names.setdefault(need, []).append(name)
        requests = [(request_of(self._resources, need), len(same)) for need, same in names.items()]
        found: dict[str, Offer] = {}
        for choice in plan(requests, free, self._preference(nodes, home)):
            for name, offer in zip(names[choice.request.need], choice.chosen, strict=False):
                found[name] = offer
                role = choice.request.need.role
                bid = choice.request.bid
                price = offer.price if offer.terms.named_price else None
                self._agreed[name] = Agreement(offer.node.id, role, offer.amounts, bid, price, now)
        return found

    def adopt(self, name: str, agreement: Agreement) -> None:
        """Take over what an earlier buyer of the run has agreed on."""
        self._agreed[name] = agreement
        self.begin(name)

    def agree(self, name: str, agreement: Agreement) -> None:
        """Hold a lease that began without terms to those which its node's owner has now; it costs nothing."""
        self._agreed[name] = agreement

    def begin(self, name: str) -> None:
        """Bill a lease with a price from its beginning."""
        if self._agreed[name].price is not None:
            self._billed_s[name], self._owed = self._agreed[name].since_s, self._owed or 0.0

    @property
    def pays(self) -> bool:
        """Whether the run has leases on owners' terms."""
        return bool(self._agreed)

    @property
    def names(self) -> set[str]:
        """Names of the leases on owners' terms."""
        return set(self._agreed)

    def agreement(self, name: str) -> Agreement | None:
        """Terms of a lease; None if it has none."""
        return self._agreed.get(name)

    def end(self, name: str, now: float) -> None:
        """End a lease, or forget one that never began."""
        if name in self._billed_s:
            self._owed = self._bill(name, now) + (self._owed or 0.0)
        for known in (self._agreed, self._billed_s, self._notices):
            known.pop(name, None)

    def billed(self, until_s: float) -> None:
        """Don't bill anew for what an earlier buyer has billed, up to a monotonic time."""
        self._billed_s = {name: max(since_s, until_s) for name, since_s in self._billed_s.items()}

    def bill(self, now: float) -> float | None:
        """Cost since the last bill, of all leases; None if there never was one with a price."""
        if self._owed is None:
            return None
        cost = self._owed + sum(self._bill(name, now) for name in self._billed_s)
        self._owed, self._billed_s = 0.0, dict.fromkeys(self._billed_s, now)
        return cost

    def ending(self, nodes: Sequence[NodeResources], now: float) -> dict[str, str]:
        """Reasons by name of the leases whose end is near, by the terms that their nodes have now."""
        here = {node.id: node for node in nodes}
        for name, agreed in list(self._agreed.items()):
            node = here.get(agreed.node)
            if name not in self._notices and node is not None and (notice := _notice(agreed, node, now)):
                self._notices[name] = notice
        return {name: notice.reason for name, notice in self._notices.items()}

    def take_notice(self, reasons: Mapping[str, str], now: float) -> None:
        """Give notice to leases that another run has outbid."""
        for name in reasons.keys() - self._notices.keys():
            self._notices[name] = _Notice(reasons[name], now + GRACE_S)

    def over(self, now: float) -> list[str]:
        """Names of the leases that have come to their end."""
        return [name for name, notice in self._notices.items() if now >= notice.end_s]

    def fail(self, node: str, now: float) -> None:
        """Leave a node out for a while that had no room after all."""
        self._left_out = {left: until for left, until in self._left_out.items() if until > now}
        self._left_out[node] = now + LEFT_OUT_S

    def refusal(self, need: Need, nodes: Sequence[NodeResources], home: str) -> CapacityError:
        """The reason that no node has an acceptable offer, or that none could be taken."""
        found = plan([(request_of(self._resources, need), 1)], nodes, self._preference(nodes, home))
        if found[0].chosen:
            fix = "raise resources.worker_price.bid, or wait"
            return CapacityError("CFG004", f"other runs have the machines for a {need.role}", fix=fix)
        return too_few(found, 0, 1)

    def _bill(self, name: str, now: float) -> float:
        return (self._agreed[name].price or 0.0) * max(0.0, now - self._billed_s[name]) / HOUR_S

    def _as_left(self, node: NodeResources, placed: Container[str]) -> NodeResources:
        """A node without what was agreed on there and isn't placed yet."""
        for name, agreed in self._agreed.items():
            if agreed.node == node.id and name not in placed:
                node = without(node, agreed.amounts, 1)
        return node

    def _preference(self, nodes: Sequence[NodeResources], home: str) -> Preference:
        held = Counter(agreed.node for agreed in self._agreed.values())
        spent = sum(agreed.price or 0.0 for agreed in self._agreed.values())
        return replace(preference(self._resources, sites(nodes, {home, *held}), self.speeds, spent), held=held)


def _notice(agreed: Agreement, node: NodeResources, now: float) -> _Notice | None:
    """Notice to a lease, because its time is nearly up or the owner's terms no longer allow it; None if all is well."""
    terms = read_terms(node.labels)
    if isinstance(terms, str):
        return None
    longest_s = terms.max_lease_s
    if agreed.role not in terms.accepts or not longest_s:
        return _Notice("its owner lets the machine no longer", now + GRACE_S)
    if agreed.bid < (floor := terms.floor * (1.0 if terms.offer == "whole" else share(agreed.amounts, node))):
        return _Notice(f"the machine's floor is {floor:g} now, and the bid is {agreed.bid:g}", now + GRACE_S)
    grace_s = min(GRACE_S, longest_s / 2)
    if now >= agreed.since_s + longest_s - grace_s:
        return _Notice(f"its lease ends after {longest_s:g} s", now + grace_s)
    return None
