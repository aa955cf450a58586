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
from hypha_ray.config.resources import Resources
from hypha_ray.errors import CapacityError, ConfigError
from hypha_ray.market.leases import SITE, LeaseRequest, Offer, are_posted, is_firm, read_terms, share
from hypha_ray.market.requirements import Need, NodeResources, group_need, server_need, workers_to_start
from hypha_ray.market.selection import UNKNOWN, Choice, Preference, Speeds, choose_machines, without

LEFT_OUT_S = 10.0
"""Seconds for which a node is left out that offered room and didn't give it."""
GRACE_S = 30.0
"""Longest time in seconds that an actor has to leave a machine; half of the longest lease if that is shorter."""
HOUR_S = 3600.0


def trades(resources: Resources, nodes: Sequence[NodeResources]) -> bool:
    """Whether machines are chosen by owners' terms or by a strategy; otherwise Ray packs them."""
    return resources.strategy != "cheapest" or any(are_posted(node.labels) for node in nodes)


def request_of(resources: Resources, need: Need) -> LeaseRequest:
    """Request for leases of one need, at the job's price for its role."""
    price = resources.parameter_server_price if need.role == "server" else resources.worker_price
    return LeaseRequest(need, price.public_bid, price.max)


def choices(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> list[Choice]:
    """Machines that a job would choose now: parameter servers first, then each group of workers."""
    needs = [(server_need(job), job.sync.fragments)]
    needs += [(group_need(group), group.count) for group in job.worker_groups]
    requests = []
    for need, count in needs:
        if need.bundle():
            requests.append((request_of(job.resources, need), count))
    return choose_machines(requests, nodes, preference(job.resources, sites(nodes, {home}), speeds))


def sites(nodes: Sequence[NodeResources], ids: Collection[str]) -> set[str]:
    """Sites of the nodes with these ids."""
    return {node.labels[SITE] for node in nodes if SITE in node.labels and node.id in ids}


def check_generators(job: Job, nodes: Sequence[NodeResources]) -> None:
    """Refuse generators where machines are chosen by owners' terms.

    Raises:
        ConfigError: CFG011.

    """
    if job.rl.generators and trades(job.resources, nodes):
        fix = "leave rl.generators at 0 on this cluster: generators have no bid yet"
        raise ConfigError("CFG011", "rl.generators and terms of the machines' owners exclude each other", fix=fix)


def preference(resources: Resources, own_sites: Collection[str], speeds: Speeds, spent: float = 0.0) -> Preference:
    """Preference of a job that pays `spent` per hour already."""
    limit = resources.max_price_per_hour
    budget = math.inf if limit is None else limit - spent
    return Preference(resources.strategy, budget, own_sites, speeds=speeds)


def workers_to_hire(job: Job, nodes: Sequence[NodeResources], home: str, speeds: Speeds = UNKNOWN) -> list[int]:
    """Numbers of the workers that find room now, and on terms that the job accepts.

    Args:
        job: the job file.
        nodes: nodes of the cluster.
        home: id of the scheduler's node.
        speeds: speeds of the job's workers.

    Raises:
        CapacityError: there are fewer than `min_workers`.
        ConfigError: CFG012, there is a budget, and no owner names a price; or CFG011, as `check_generators`.

    """
    check_generators(job, nodes)
    if job.goal.at_most is not None and not any("price" in node.labels for node in nodes):
        fix = "name prices, see docs/market.md, or leave goal.at_most out"
        raise ConfigError("CFG012", "goal.at_most needs a price, and no owner of a machine has named one", fix=fix)
    fitting_workers = workers_to_start(job, nodes)
    if not trades(job.resources, nodes):
        return fitting_workers
    all_choices = choices(job, nodes, home, speeds)
    available = Counter[Need]()
    for choice in all_choices:
        available[choice.request.need] += len(choice.chosen)
    _require_servers(job, all_choices)
    numbers = list[int]()
    first_worker = 0
    for group in job.worker_groups:
        need = group_need(group)
        count = group.count
        if need.bundle():
            count = min(count, available[need])
            available[need] -= count
        numbers += range(first_worker, first_worker + count)
        first_worker += group.count
    least_workers = min(job.resources.min_workers, job.num_workers)
    if len(numbers) < least_workers:
        raise too_few(_of_role("worker", all_choices), len(numbers), least_workers)
    return numbers


def _require_servers(job: Job, all_choices: Sequence[Choice]) -> None:
    of_servers = _of_role("server", all_choices)
    if not of_servers:
        return
    count = len(of_servers[0].chosen)
    if count < job.sync.fragments:
        raise too_few(of_servers, count, job.sync.fragments)


def _of_role(role: str, all_choices: Sequence[Choice]) -> list[Choice]:
    return [choice for choice in all_choices if choice.request.need.role == role]


def too_few(role_choices: Sequence[Choice], count: int, least_workers: int) -> CapacityError:
    """The reason that only `count` leases of one role are to be had on terms that the job accepts."""
    incomplete_choice = next(choice for choice in role_choices if len(choice.chosen) < choice.count)
    capacity = 0
    refusals = []
    prices = []
    for answer in incomplete_choice.answers:
        if isinstance(answer, Offer):
            capacity += answer.capacity
            continue
        refusals.append(answer)
        if answer.ask is not None:
            prices.append(answer.ask)
    role = incomplete_choice.request.need.role
    key = "parameter_server_price" if role == "server" else "worker_price"
    if capacity > len(incomplete_choice.chosen):
        problem = f"resources.max_price_per_hour pays for {count} of {least_workers} {role}s"
        return CapacityError("CFG004", problem, fix="raise it, or wait for cheaper nodes")
    if prices:
        problem = "no further node is cheap enough" if count else "no node is cheap enough"
        got = f"{min(prices):g} per hour at the cheapest"
        allowed = f"{incomplete_choice.request.max_price:g}"
        fix = f"raise resources.{key}.max, or wait for cheaper nodes"
        return CapacityError("CFG004", problem, got, allowed, fix)
    reason = "no node has room"
    if refusals:
        reason = f"{refusals[0].node.address} is refused: {refusals[0].reason}"
    problem = f"owners' terms leave {count} of {least_workers} {role}s"
    return CapacityError("CFG004", problem, got=reason, fix=f"see --dry-run; raise resources.{key}.bid, or add nodes")


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
        self.max_price = math.inf
        """Highest price per hour of a worker's new lease, by the run's goal; infinite: any."""
        self.firm_only = False
        """Whether workers' new leases are of machines on demand alone."""
        self._agreements: dict[str, Agreement] = {}
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
        needs: Mapping[str, Need],
        nodes: Sequence[NodeResources],
        home: str,
        placed: Container[str],
        now: float,
    ) -> dict[str, Offer]:
        """Agree on an offer for each name; a name that finds none isn't in the result.

        Args:
            needs: needs by name of the lease.
            nodes: nodes of the cluster.
            home: id of the scheduler's node.
            placed: names of leases that the nodes' free amounts are without.
            now: monotonic time in seconds.

        """
        candidates = []
        for node in nodes:
            if self._left_out.get(node.id, now) <= now:
                candidates.append(self._without_agreed(node, placed))
        names: dict[Need, list[str]] = {}
        for name in sorted(needs, key=lambda name: needs[name].role == "worker"):  # Servers come first.
            names.setdefault(needs[name], []).append(name)
        requests = []
        for need, names_of_need in names.items():
            request = request_of(self._resources, need)
            if need.role == "worker":
                request = replace(request, max_price=min(request.max_price, self.max_price))
                if self.firm_only:
                    candidates = list(filter(is_firm, candidates))
            requests.append((request, len(names_of_need)))
        offers: dict[str, Offer] = {}
        for choice in choose_machines(requests, candidates, self._preference(nodes, home)):
            request = choice.request
            for name, offer in zip(names[request.need], choice.chosen, strict=False):
                offers[name] = offer
                price = offer.price if offer.terms.named_price else None
                agreement = Agreement(offer.node.id, request.need.role, offer.amounts, request.bid, price, now)
                self._agreements[name] = agreement
        return offers

    def adopt(self, name: str, agreement: Agreement) -> None:
        """Take over what an earlier buyer of the run has agreed on."""
        self._agreements[name] = agreement
        self.begin(name)

    def agree(self, name: str, agreement: Agreement) -> None:
        """Hold a lease that began without terms to those which its node's owner has now; it costs nothing."""
        self._agreements[name] = agreement

    def begin(self, name: str) -> None:
        """Bill a lease with a price from its beginning."""
        agreement = self._agreements[name]
        if agreement.price is not None:
            self._billed_s[name] = agreement.since_s
            self._owed = self._owed or 0.0

    @property
    def pays(self) -> bool:
        """Whether the run has leases on owners' terms."""
        return bool(self._agreements)

    @property
    def names(self) -> set[str]:
        """Names of the leases on owners' terms."""
        return set(self._agreements)

    def agreement(self, name: str) -> Agreement | None:
        """Terms of a lease; None if it has none."""
        return self._agreements.get(name)

    def end(self, name: str, now: float) -> None:
        """End a lease, or forget one that never began."""
        if name in self._billed_s:
            self._owed = self._bill(name, now) + (self._owed or 0.0)
        self._agreements.pop(name, None)
        self._billed_s.pop(name, None)
        self._notices.pop(name, None)

    def billed(self, until_s: float) -> None:
        """Don't bill anew for what an earlier buyer has billed, up to a monotonic time."""
        self._billed_s = {name: max(since_s, until_s) for name, since_s in self._billed_s.items()}

    def owed(self, now: float) -> float:
        """Cost since the last bill, which it leaves unbilled."""
        return (self._owed or 0.0) + sum(self._bill(name, now) for name in self._billed_s)

    def bill(self, now: float) -> float | None:
        """Cost since the last bill, of all leases; None if there never was one with a price."""
        if self._owed is None:
            return None
        costs = [self._bill(name, now) for name in self._billed_s]
        cost = self._owed + sum(costs)
        self._owed = 0.0
        self._billed_s = dict.fromkeys(self._billed_s, now)
        return cost

    def ending(self, nodes: Sequence[NodeResources], now: float) -> dict[str, str]:
        """Reasons by name of the leases whose end is near, by the terms that their nodes have now."""
        node_by_id = {node.id: node for node in nodes}
        for name, agreement in self._agreements.items():
            node = node_by_id.get(agreement.node)
            if name in self._notices or node is None:
                continue
            notice = _notice(agreement, node, now)
            if notice is not None:
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
        self._left_out = {node_id: until_s for node_id, until_s in self._left_out.items() if until_s > now}
        self._left_out[node] = now + LEFT_OUT_S

    def refusal(self, need: Need, nodes: Sequence[NodeResources], home: str) -> CapacityError:
        """The reason that no node has an acceptable offer, or that none could be taken."""
        request = request_of(self._resources, need)
        (choice,) = choose_machines([(request, 1)], nodes, self._preference(nodes, home))
        if choice.chosen:
            fix = "raise resources.worker_price.bid, or wait"
            return CapacityError("CFG004", f"other runs have the machines for a {need.role}", fix=fix)
        return too_few([choice], 0, 1)

    def _bill(self, name: str, now: float) -> float:
        price = self._agreements[name].price or 0.0
        unbilled_s = max(0.0, now - self._billed_s[name])
        return price * unbilled_s / HOUR_S

    def _without_agreed(self, node: NodeResources, placed: Container[str]) -> NodeResources:
        """A node without what was agreed on there and isn't placed yet."""
        for name, agreement in self._agreements.items():
            if agreement.node == node.id and name not in placed:
                node = without(node, agreement.amounts, 1)
        return node

    def _preference(self, nodes: Sequence[NodeResources], home: str) -> Preference:
        leases_by_node = Counter(agreement.node for agreement in self._agreements.values())
        prices = [agreement.price or 0.0 for agreement in self._agreements.values()]
        own_sites = sites(nodes, {home, *leases_by_node})
        return replace(preference(self._resources, own_sites, self.speeds, sum(prices)), leases_by_node=leases_by_node)


def _notice(agreement: Agreement, node: NodeResources, now: float) -> _Notice | None:
    """Notice to a lease, because its time is nearly up or the owner's terms no longer allow it; None if all is well."""
    terms = read_terms(node.labels)
    if isinstance(terms, str):
        return None
    longest_s = terms.max_lease_s
    if agreement.role not in terms.accepts or not longest_s:
        return _Notice("its owner lets the machine no longer", now + GRACE_S)
    floor = terms.floor
    if terms.offer != "whole":
        floor *= share(agreement.amounts, node)
    if agreement.bid < floor:
        return _Notice(f"the machine's floor is {floor:g} now, and the bid is {agreement.bid:g}", now + GRACE_S)
    grace_s = min(GRACE_S, longest_s / 2)
    if now >= agreement.since_s + longest_s - grace_s:
        return _Notice(f"its lease ends after {longest_s:g} s", now + grace_s)
    return None
