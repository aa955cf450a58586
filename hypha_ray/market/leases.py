"""Leases of machines: the book of those that were granted, and offers on the terms of the machines' owners.

A lease ends by release, or at its expiry if it isn't renewed before. A renewal sets the expiry anew, and two don't add
up. A late one is refused, since another holder may have the resources. Times are monotonic seconds, passed in, so that
no wall clock matters.

evaluate(node, terms, request) → Offer | Refusal        pure: every job of a cluster comes to the same answer

Terms are labels of the node, and what was posted later with ``jobs/market.py``. Prices are per hour of the whole node,
in any unit that all owners and jobs of a cluster agree on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hypha_ray.config.value_types import NotNegative, Positive
from hypha_ray.errors import ConfigError
from hypha_ray.market.requirements import Need, NodeResources, times_in

Role = Literal["worker", "server"]
SITE = "site"
MARKET_TYPE = "ray.io/market-type"
"""Label that Ray gives a node of a cloud: spot or on-demand."""
LEASED = ("CPU", "GPU", "memory")
"""Resources of a node that leases divide among them."""


@dataclass(slots=True)
class Lease:
    """Amounts of resources that are one holder's until `expiry_s`, which its book alone puts off.

    `id` is never used twice in a book. `fence` counts the leases that this holder has had: a process of an earlier one
    shows a lower fence, by which it is known to be late.
    """

    id: int
    holder: str
    fence: int
    amounts: Mapping[str, float]
    expiry_s: float

    def expired(self, now: float) -> bool:
        """Whether the lease is over at `now`, which it is from its expiry on."""
        return now >= self.expiry_s


class LeaseBook:
    """Grants, renews and ends leases. What is free is counted elsewhere: by Ray, for placement groups."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._fences: dict[str, int] = {}
        self._granted = 0
        self._next_expiry_s = math.inf
        """Time before which no lease expires."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases that aren't over, in the order in which they were granted."""
        return tuple(self._leases.values())

    def holds(self, lease: Lease) -> bool:
        """Whether the lease isn't over; a renewed one is still the same lease."""
        return lease.id in self._leases

    def grant(self, holder: str, amounts: Mapping[str, float], now: float, ttl_s: float = math.inf) -> Lease:
        """A lease for `ttl_s` seconds."""
        self._granted += 1
        self._fences[holder] = self._fences.get(holder, 0) + 1
        lease = Lease(self._granted, holder, self._fences[holder], dict(amounts), now + ttl_s)
        self._leases[lease.id] = lease
        self._next_expiry_s = min(self._next_expiry_s, lease.expiry_s)
        return lease

    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        """The lease with its expiry at least `ttl_s` seconds from now.

        None if it is over, expired or another holder's: the holder has lost it and must stop.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder != holder or lease.fence != fence or lease.expired(now):
            return None
        expiry_s = now + ttl_s
        lease.expiry_s = max(lease.expiry_s, expiry_s)
        return lease

    def release(self, lease: Lease) -> bool:
        """End a lease; False if it was over before, which does no harm."""
        return self._leases.pop(lease.id, None) is not None

    def expired(self, now: float) -> set[int]:
        """Ids of leases that have expired and aren't released."""
        if now < self._next_expiry_s:  # Renewals only put it off, so a large book is seldom searched.
            return set()
        expired_ids: set[int] = set()
        self._next_expiry_s = math.inf
        for lease in self._leases.values():
            self._next_expiry_s = min(self._next_expiry_s, lease.expiry_s)
            if lease.expired(now):
                expired_ids.add(lease.id)
        return expired_ids

    def defer(self, seconds: float) -> None:
        """Extend every lease by the time that the judging process was stopped."""
        for lease in self._leases.values():
            lease.expiry_s += seconds


def _roles(text: object) -> object:
    """Roles of a label's value, such as ``worker_server``; a label can't have a comma."""
    if not isinstance(text, str):
        return text
    return [role for role in text.split("_") if role != "none"]


class Terms(BaseModel):
    """Terms of one node."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    price: NotNegative = Field(0.0, description="price of the whole node per hour")
    floor: NotNegative = Field(0.0, description="lowest bid for the whole node per hour")
    offer: Literal["flexible", "whole"] = Field("flexible", description="whole: one lease has all of the node")
    accepts: Annotated[frozenset[Role], BeforeValidator(_roles)] = Field(
        frozenset(("worker", "server")), description="roles: worker, server, worker_server or none"
    )
    max_lease_s: Annotated[float, Field(ge=0)] = Field(math.inf, description="longest lease in seconds; 0: none")
    throughput: Positive | None = Field(None, description="speed of the whole node, in a unit that all owners use")
    site: str | None = Field(None, description="place of the node")

    @property
    def named_price(self) -> bool:
        """Whether the owner has named a price, which may be 0."""
        return "price" in self.model_fields_set


def is_firm(node: NodeResources) -> bool:
    """Whether a node is no spot machine, by Ray's label."""
    return node.labels.get(MARKET_TYPE) != "spot"


PRICING = frozenset(Terms.model_fields) - {SITE}
"""Labels that are terms and nothing else; a site is a place even if no owner has terms."""


def are_posted(labels: Mapping[str, str]) -> bool:
    """Whether a node's labels have terms."""
    return not PRICING.isdisjoint(labels)


def require_terms(labels: Mapping[str, str]) -> None:
    """Check terms that an owner is about to post.

    Raises:
        ConfigError: CFG003, one of them is out of range.

    """
    terms = read_terms(labels)
    if isinstance(terms, str):
        raise ConfigError("CFG003", "the terms are out of range", terms, "numbers ≥ 0 and known roles", "see --help")


def read_terms(labels: Mapping[str, str]) -> Terms | str:
    """Terms that a node's labels state; the first label that can't be used, if there is one."""
    try:
        return Terms.model_validate(labels)
    except ValidationError as error:
        first_error = error.errors()[0]
        return f"{first_error['loc'][0]} = {first_error['input']}"


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Request for leases of one need.

    Attributes:
        bid: public bid per hour of a lease, which an owner's floor is compared with.
        max_price: highest price per hour of a lease; it stays in the job.

    """

    need: Need
    bid: float
    max_price: float


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer of a node: `capacity` leases, each of these amounts at this price per hour.

    Attributes:
        terms: terms of the node.
        capacity: number of leases that find room now.
        speed: samples per second of a worker on one lease; None if that wasn't measured.

    """

    node: NodeResources
    terms: Terms
    price: float
    amounts: Mapping[str, float]
    capacity: int
    speed: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a node or of its price.

    Attributes:
        ask: price per hour if it alone is the reason; None otherwise.

    """

    node: NodeResources
    reason: str
    ask: float | None = None


def evaluate(node: NodeResources, terms: Terms, request: LeaseRequest) -> Offer | Refusal:
    """Answer of one node, whose labels the request admits."""
    need = request.need
    if reason := _objection(terms, need.role):
        return Refusal(node, reason)
    if not times_in(need, node.total):
        total = _amounts_text(node.total)
        return Refusal(node, f"it is too small: {total} in all")
    if terms.offer == "whole":
        part = 1.0
        amounts = {name: node.total[name] for name in LEASED if node.total.get(name)}
        capacity = int(fits(amounts, node.free))
        busy = "it is let as a whole, and is in use"
    else:
        amounts = need.bundle()
        part = share(amounts, node)
        capacity = times_in(need, node.free)
        busy = f"it has too little left: {_amounts_text(node.free)}"
    if not capacity:
        return Refusal(node, busy)
    floor = terms.floor * part
    price = terms.price * part
    if request.bid < floor:
        return Refusal(node, f"the bid {request.bid:g} is below its floor, {floor:g}")
    if price > request.max_price:
        return Refusal(node, f"it asks {price:g}, and {request.max_price:g} is the most to be paid", price)
    return Offer(node, terms, price, amounts, capacity)


def answers(request: LeaseRequest, nodes: Sequence[NodeResources]) -> list[Offer | Refusal]:
    """Answers of all nodes, in their order."""
    node_answers: list[Offer | Refusal] = []
    for node, is_admitted in zip(nodes, request.need.admits(nodes), strict=True):
        if is_admitted:
            node_answers.append(_answer(node, request))
        else:
            node_answers.append(Refusal(node, f"its gpu_type isn't {request.need.gpu_type}"))
    return node_answers


def _answer(node: NodeResources, request: LeaseRequest) -> Offer | Refusal:
    terms = read_terms(node.labels)
    if isinstance(terms, str):
        return Refusal(node, f"its label {terms} can't be used")
    return evaluate(node, terms, request)


def _objection(terms: Terms, role: str) -> str | None:
    """Objection of the owner to a role, at any price; None without one."""
    if role not in terms.accepts:
        return f"its owner accepts no {role}"
    if not terms.max_lease_s:
        return "its owner lets it no longer"
    if role == "server" and terms.max_lease_s < math.inf:
        return f"its leases end after {terms.max_lease_s:g} s, and a server stays"
    return None


def share(amounts: Mapping[str, float], node: NodeResources) -> float:
    """Largest of the shares of CPUs, GPUs and memory that these amounts are; at most the whole node."""
    shares = []
    for name, amount in amounts.items():
        total = node.total.get(name) or amount
        shares.append(amount / total)
    return min(1.0, max(shares))


def least_bid(offer: Offer) -> float:
    """Least bid per hour, and least price to be paid, with which a lease on these terms is to be had."""
    floor = offer.terms.floor
    if offer.terms.offer != "whole":
        floor *= share(offer.amounts, offer.node)
    return max(floor, offer.price)


def fits(amounts: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Whether these amounts are free, counted in ten-thousandths as Ray does."""
    return all(free.get(name, 0.0) >= amount - 1e-4 for name, amount in amounts.items())


def has_room(offer: Offer, nodes: Sequence[NodeResources]) -> bool:
    """Whether the node of an offer still has what it has offered, by a later look at the nodes."""
    return any(node.id == offer.node.id and fits(offer.amounts, node.free) for node in nodes)


def _amounts_text(amounts: Mapping[str, float]) -> str:
    memory_bytes = round(amounts.get("memory", 0.0))
    need = Need("", amounts.get("CPU", 0.0), amounts.get("GPU", 0.0), memory_bytes)
    return str(need) if need.bundle() else "nothing"
