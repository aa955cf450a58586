"""The book of leases: holder, resources and expiry of each.

A lease ends by release, or by expiry when its holder falls silent. A renewal sets the expiry anew and never adds up. A
late one is refused, since the resources may be promised to another holder by then. Times are monotonic
seconds, passed in, so that no wall clock matters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hypha_ray.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Lease:
    """Amounts of resources that are one holder's until `expiry_s`.

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
    """Grants, renews and ends leases. Never grants more than there is.

    Args:
        capacity: amounts that there are in all; None if they are counted elsewhere, as Ray does for placement groups.

    """

    def __init__(self, capacity: Mapping[str, float] | None = None) -> None:
        self._capacity = capacity
        self._leases: dict[int, Lease] = {}
        self._fences: dict[str, int] = {}
        self._granted = 0

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases that aren't over, in the order in which they were granted."""
        return tuple(self._leases.values())

    def holds(self, lease: Lease) -> bool:
        """Whether the lease isn't over; a renewed one is still the same lease."""
        return lease.id in self._leases

    def free(self) -> dict[str, float]:
        """Unleased resources. An expired lease counts until `expire` removes it: its holder may still be at work."""
        left = dict(self._capacity or {})
        for lease in self._leases.values():
            for name, amount in lease.amounts.items():
                left[name] = round(left.get(name, 0.0) - amount, 4)
        return left

    def grant(self, holder: str, amounts: Mapping[str, float], now: float, ttl_s: float = math.inf) -> Lease:
        """A lease for `ttl_s` seconds.

        Raises:
            CapacityError: there isn't as much left.

        """
        free = {} if self._capacity is None else self.free()
        missing = [name for name, amount in amounts.items() if amount > free.get(name, 0.0)]
        if self._capacity is not None and missing:
            short = ", ".join(f"{amounts[name]:g} {name} of {free.get(name, 0.0):g}" for name in missing)
            raise CapacityError("CFG004", f"{holder} asks for more than is free: {short}")
        self._granted += 1
        self._fences[holder] = self._fences.get(holder, 0) + 1
        lease = Lease(self._granted, holder, self._fences[holder], dict(amounts), now + ttl_s)
        self._leases[lease.id] = lease
        return lease

    def renew(self, lease_id: int, holder: str, fence: int, now: float, ttl_s: float) -> Lease | None:
        """The lease with its expiry at least `ttl_s` seconds from now.

        None if it is over, expired or another holder's: the holder has lost it and must stop.
        """
        lease = self._leases.get(lease_id)
        if lease is None or (lease.holder, lease.fence) != (holder, fence) or lease.expired(now):
            return None
        expiry_s = max(lease.expiry_s, now + ttl_s)  # Not by `replace`, which takes thrice the time.
        self._leases[lease_id] = renewed = Lease(lease.id, lease.holder, lease.fence, lease.amounts, expiry_s)
        return renewed

    def release(self, lease: Lease) -> bool:
        """End a lease; False if it was over before, which does no harm."""
        return self._leases.pop(lease.id, None) is not None

    def expire(self, now: float) -> list[Lease]:
        """Take out the leases that are over at `now`; the caller ends what their holders still do."""
        over = [lease for lease in self._leases.values() if lease.expired(now)]
        for lease in over:
            self.release(lease)
        return over

    def defer(self, seconds: float) -> None:
        """Extend every lease by the time that the judging process was stopped."""
        for key, lease in self._leases.items():
            self._leases[key] = replace(lease, expiry_s=lease.expiry_s + seconds)
