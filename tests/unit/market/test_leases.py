"""The book of leases: answers of a node by hand, then every order of events against a simple model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hypha_ray.market.leases import (
    Lease,
    LeaseBook,
    LeaseRequest,
    Offer,
    Refusal,
    Terms,
    answers,
    are_posted,
    evaluate,
    read_terms,
)
from hypha_ray.market.requirements import Need, NodeResources
from tests.unit.market.nodes import node

WORKER = LeaseRequest(Need("worker", cpu=1), bid=10, max_price=10)
OFFER_S, LEASE_S = 0.5, 10.0
GPU = {"GPU": 1.0}


def answer(request: LeaseRequest, of: NodeResources) -> Offer | Refusal:
    (found,) = answers(request, [of])
    return found


def test_offer_of_a_part_costs_its_share_and_has_room_for_what_is_free() -> None:
    found = answer(WORKER, node("a", cpus=4, free=3, price=8))
    assert isinstance(found, Offer)
    assert (found.price, found.capacity, found.amounts) == (2.0, 3, {"CPU": 1})


def test_offer_costs_the_largest_share_of_cpus_gpus_and_memory() -> None:
    total = {"CPU": 8.0, "GPU": 2.0, "memory": 16e9}
    of = NodeResources("a", total, total, {"price": "8"})
    for need, price in (
        (Need("worker", 1, 1), 4.0),
        (Need("worker", 1, 0.5), 2.0),
        (Need("worker", 1, memory_bytes=12 * 10**9), 6.0),
        (Need("worker", 8, 2, 10**9), 8.0),
    ):
        found = evaluate(of, Terms(price=8), LeaseRequest(need, 100, 100))
        assert isinstance(found, Offer) and found.price == price


def test_offer_of_a_whole_node_has_all_of_it_for_one_lease_at_the_whole_price() -> None:
    total = {"CPU": 8.0, "memory": 16e9, "node:10.0.0.1": 1.0}
    found = answer(WORKER, NodeResources("a", total, total, {"price": "8", "offer": "whole"}))
    assert isinstance(found, Offer)
    assert (found.price, found.capacity, found.amounts) == (8.0, 1, {"CPU": 8.0, "memory": 16e9})


def test_node_without_terms_costs_nothing_and_accepts_all() -> None:
    for role in ("worker", "server"):
        found = answer(LeaseRequest(Need(role, 1), 0, 0), node("a", cpus=2, site="eu"))
        assert isinstance(found, Offer) and (found.price, found.capacity) == (0.0, 2)


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (node("a", accepts="server"), "its owner accepts no worker"),
        (node("a", accepts="none"), "its owner accepts no worker"),
        (node("a", max_lease_s=0), "its owner lets it no longer"),
        (node("a", cpus=0.5), "it is too small: 0.5 CPU in all"),
        (node("a", free=0.5), "it has too little left: 0.5 CPU"),
        (node("a", free=0), "it has too little left: nothing"),
        (node("a", cpus=4, free=3, offer="whole"), "it is let as a whole, and is in use"),
        (node("a", floor=11), "the bid 10 is below its floor, 11"),
        (node("a", price=10.5), "it asks 10.5, and 10 is the most to be paid"),
        (node("a", price="cheap"), "its label price = cheap can't be used"),
        (node("a", price=-1), "its label price = -1 can't be used"),
        (node("a", offer="half"), "its label offer = half can't be used"),
        (node("a", accepts="workers"), "its label accepts = workers can't be used"),
    ],
)
def test_refusal_names_its_reason(of: NodeResources, reason: str) -> None:
    found = answer(WORKER, of)
    assert isinstance(found, Refusal) and found.reason == reason
    assert found.ask == (10.5 if "asks" in reason else None)


def test_floor_holds_for_the_share_that_is_asked_for() -> None:
    assert isinstance(answer(WORKER, node("a", cpus=4, floor=40)), Offer)
    assert isinstance(answer(WORKER, node("a", cpus=4, floor=44)), Refusal)


def test_server_is_refused_where_leases_end() -> None:
    found = answer(LeaseRequest(Need("server", 1), 10, 10), node("a", max_lease_s=3600))
    assert isinstance(found, Refusal) and found.reason == "its leases end after 3600 s, and a server stays"
    assert isinstance(answer(WORKER, node("a", max_lease_s=3600)), Offer)


def test_gpu_type_is_compared_with_all_nodes_as_without_a_market() -> None:
    found = answers(LeaseRequest(Need("worker", 1, gpu_type="h100"), 1, 1), [node("a", gpu_type="h100"), node("b")])
    assert [type(one) for one in found] == [Offer, Refusal]


def test_terms_are_posted_by_any_of_their_labels_but_a_site_is_only_a_place() -> None:
    assert not are_posted(node("a", site="eu").labels)
    assert all(are_posted({name: "1"}) for name in ("price", "floor", "offer", "accepts", "max_lease_s", "throughput"))


def test_terms_of_labels() -> None:
    labels = {"price": "0.5", "accepts": "worker_server", "max_lease_s": "60", "site": "eu", "ray.io/node-id": "f00"}
    assert read_terms(labels) == Terms(price=0.5, max_lease_s=60, site="eu")
    assert Terms().max_lease_s == math.inf


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook()


def test_renew_accepted_offer_runs_from_the_acceptance(book: LeaseBook) -> None:
    offer = book.grant("run-a", GPU, now=0.0, ttl_s=OFFER_S)
    expiries = []
    now = 0.3
    for _ in range(3):
        renewed = book.renew(offer.id, "run-a", offer.fence, now, LEASE_S)
        assert renewed is not None
        expiries.append(round(renewed.expiry_s, 3))
        now += LEASE_S * 2 / 3
    assert expiries == [10.3, 16.967, 23.633]


def test_renew_twice_replaces_and_never_adds_up(book: LeaseBook) -> None:
    lease = book.grant("run-a", GPU, now=0.0, ttl_s=LEASE_S)
    book.renew(lease.id, "run-a", lease.fence, 1.0, LEASE_S)
    renewed = book.renew(lease.id, "run-a", lease.fence, 2.0, LEASE_S)
    assert renewed is not None
    assert renewed.expiry_s == 12.0


def test_renew_for_less_never_shortens(book: LeaseBook) -> None:
    lease = book.grant("run-a", GPU, now=0.0, ttl_s=LEASE_S)
    renewed = book.renew(lease.id, "run-a", lease.fence, 1.0, 0.5)
    assert renewed is not None
    assert renewed.expiry_s == 10.0


def test_expired_at_the_very_expiry_is_over(book: LeaseBook) -> None:
    lease = book.grant("run-a", GPU, now=0.0, ttl_s=LEASE_S)
    assert not lease.expired(9.999)
    assert lease.expired(10.0)


@pytest.mark.parametrize(
    ("number", "holder", "fence"), [(2, "run-a", 1), (1, "run-b", 1), (1, "run-a", 2), (1, "run-a", 0)]
)
def test_renew_unknown_foreign_or_stale_is_refused(book: LeaseBook, number: int, holder: str, fence: int) -> None:
    book.grant("run-a", GPU, now=0.0, ttl_s=LEASE_S)
    assert book.renew(number, holder, fence, 1.0, LEASE_S) is None


def test_renew_after_expiry_is_refused_until_the_lease_is_released(book: LeaseBook) -> None:
    lease = book.grant("run-a", GPU, now=0.0, ttl_s=LEASE_S)
    assert book.renew(lease.id, "run-a", lease.fence, 10.1, LEASE_S) is None
    assert book.leases == (lease,)


def test_defer_extends_all_leases_by_the_time_that_does_not_count(book: LeaseBook) -> None:
    book.grant("run-a", GPU, now=0.0, ttl_s=LEASE_S)
    book.grant("run-b", GPU, now=1.0, ttl_s=LEASE_S)
    book.defer(5.0)
    assert [lease.expiry_s for lease in book.leases] == [15.0, 16.0]


def test_grant_without_an_end_never_expires(book: LeaseBook) -> None:
    lease = book.grant("worker-0", {"CPU": 1e6}, now=0.0)
    assert (lease.amounts, lease.expired(1e12)) == ({"CPU": 1e6}, False)


def test_release_twice_gives_back_once(book: LeaseBook) -> None:
    lease = book.grant("run-a", GPU, now=0.0)
    assert book.release(lease)
    assert not book.release(lease)
    assert book.leases == ()


def test_release_by_an_earlier_life_leaves_the_new_lease(book: LeaseBook) -> None:
    first = book.grant("run-a", GPU, now=0.0)
    book.release(first)
    second = book.grant("run-a", GPU, now=1.0)
    assert (second.fence, second.id) == (2, 2)
    assert not book.release(first)
    assert book.holds(second)


HOLDERS = st.sampled_from(["a", "b", "c"])
TTL_S = st.sampled_from([1.0, 2.0, 5.0])


class LeaseMachine(RuleBasedStateMachine):
    """Random events on a book; the model is a list of every lease there ever was, with its true expiry and end."""

    book_of: type[LeaseBook] = LeaseBook

    def __init__(self) -> None:
        super().__init__()
        self.book = self.book_of()
        self.now = 0.0
        self.ever: list[Lease] = []
        self.expiry: dict[int, float] = {}

    @rule(holder=HOLDERS, units=st.integers(1, 3), ttl_s=TTL_S)
    def grant(self, holder: str, units: int, ttl_s: float) -> None:
        lease = self.book.grant(holder, {"unit": float(units)}, self.now, ttl_s)
        assert lease.amounts == {"unit": units}
        assert all(lease.id > other.id for other in self.ever)
        assert all(lease.fence > other.fence for other in self.ever if other.holder == holder)
        self.ever.append(lease)
        self.expiry[lease.id] = self.now + ttl_s

    @precondition(lambda self: self.ever)
    @rule(data=st.data(), holder=HOLDERS, off=st.sampled_from([0, 0, 0, -1, 1]), ttl_s=TTL_S)
    def renew(self, data: st.DataObject, holder: str, off: int, ttl_s: float) -> None:
        lease = data.draw(st.sampled_from(self.ever))
        holder = data.draw(st.sampled_from([lease.holder, lease.holder, holder]))
        good = lease.id in self.expiry and holder == lease.holder and off == 0 and self.now < self.expiry[lease.id]
        renewed = self.book.renew(lease.id, holder, lease.fence + off, self.now, ttl_s)
        assert (renewed is not None) == good
        if renewed is not None:
            self.expiry[lease.id] = max(self.expiry[lease.id], self.now + ttl_s)
            assert renewed.expiry_s == self.expiry[lease.id]

    @precondition(lambda self: self.ever)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.ever))
        assert self.book.release(lease) == (lease.id in self.expiry)
        self.expiry.pop(lease.id, None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def defer(self, seconds: float) -> None:
        self.now += seconds
        self.book.defer(seconds)
        self.expiry = {number: expiry_s + seconds for number, expiry_s in self.expiry.items()}

    @invariant()
    def books_agree(self) -> None:
        assert {lease.id: lease.expiry_s for lease in self.book.leases} == self.expiry
        over = {number for number, expiry_s in self.expiry.items() if self.now >= expiry_s}
        assert {lease.id for lease in self.book.leases if lease.expired(self.now)} == over
        assert self.book.expired(self.now) == over


BUDGET = settings(
    deadline=None,
    max_examples=500,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
def test_lease_book_any_order_of_events_keeps_the_rules() -> None:
    run_state_machine_as_test(LeaseMachine, settings=BUDGET)


class LateRenewal(LeaseBook):
    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        return super().renew(lease_id, holder, fence, min(now, _expiry(self, lease_id) - 0.1), ttl_s)


class RenewalByAnybody(LeaseBook):
    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        owner = next((lease.holder for lease in self.leases if lease.id == lease_id), holder)
        return super().renew(lease_id, owner, fence, now, ttl_s)


class RenewalByAnEarlierLife(LeaseBook):
    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        return super().renew(lease_id, holder, fence + (fence < self._fences.get(holder, 0)), now, ttl_s)


class RenewalThatShortens(LeaseBook):
    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        lease = super().renew(lease_id, holder, fence, now, ttl_s)
        if lease is not None:
            self._leases[lease_id] = lease = replace(lease, expiry_s=now + ttl_s)
        return lease


class RenewalThatAddsUp(LeaseBook):
    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        return super().renew(lease_id, holder, fence, now, max(0.0, _expiry(self, lease_id) - now) + ttl_s)


class NumberUsedAgain(LeaseBook):
    def release(self, lease: Lease) -> bool:
        self._granted = max((other.id for other in self.leases if other.id != lease.id), default=0)
        return super().release(lease)


class FenceThatStays(LeaseBook):
    def grant(self, holder: str, amounts: Mapping[str, float], now: float, ttl_s: float = math.inf) -> Lease:
        self._fences.clear()
        return super().grant(holder, amounts, now, ttl_s)


class DeferralOfOne(LeaseBook):
    def defer(self, seconds: float) -> None:
        for key, lease in [*self._leases.items()][:1]:
            self._leases[key] = replace(lease, expiry_s=lease.expiry_s + seconds)


class ReleaseThatForgets(LeaseBook):
    def release(self, lease: Lease) -> bool:
        return self.holds(lease)


@pytest.mark.parametrize("mutant", LeaseBook.__subclasses__(), ids=lambda mutant: mutant.__name__)
def test_lease_machine_broken_book_is_found_out(mutant: type[LeaseBook]) -> None:
    machine = type(mutant.__name__, (LeaseMachine,), {"book_of": mutant})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=settings(BUDGET, phases=[Phase.generate]))


def _expiry(book: LeaseBook, lease_id: int) -> float:
    return next((lease.expiry_s for lease in book.leases if lease.id == lease_id), math.inf)
