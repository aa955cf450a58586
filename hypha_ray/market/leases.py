"""The book of leases: holder, resources and expiry of each.

A lease ends by release, or at its expiry if it isn't renewed before. A renewal sets the expiry anew and never adds up;
a late one is refused, since the resources may be another holder's by then. Times are monotonic seconds, passed in, so
that no wall clock matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


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
        """Whether it is over at `now`; at its expiry it is."""
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
        expired: set[int] = set()
        self._next_expiry_s = math.inf
        for lease in self._leases.values():
            self._next_expiry_s = min(self._next_expiry_s, lease.expiry_s)
            if lease.expired(now):
                expired.add(lease.id)
        return expired

    def defer(self, seconds: float) -> None:
        """Extend every lease by the time that the judging process was stopped."""
        for lease in self._leases.values():
            lease.expiry_s += seconds
