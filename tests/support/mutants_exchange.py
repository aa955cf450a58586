"""The exchange's rulings with one defect each: their source with one place changed."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypha_ray.market.exchange import allotment
from tests.support.mutation import mutated

MUTANTS = {
    "the lowest bid is served first": (
        "key=lambda one: -one.bid):\n            if",
        "key=lambda one: one.bid):\n            if",
    ),
    "a lower bid passes a gang that waits": ("                break  #", "                continue  #"),
    "half a gang stays granted": ("                self._free, self._kept, self._leave, self._granted = before\n", ""),
    "shares don't look at bids": ("return max(standing.bid, 1e-9)", "return 1.0"),
    "the order by bid is a fair one": ('-standing.bid if self._order == "bid" else', '0.0 if self._order == "" else'),
    "a bid that is hardly higher takes a lease": (" and one.bid >= other.bid * OUTBID", ""),
    "an equal bid of nothing takes a lease": ("one.bid > other.bid and ", ""),
    "a run loses workers that it needs": ("granted - victim.least))", "granted))"),
    "the earliest lease goes first": ("in reversed(kept[max(0, len(kept) - spare) :]):", "in kept[:spare]:"),
    "the highest victim goes first": ("else (lambda one: -one.bid)", "else (lambda one: one.bid)"),
    "a fair share is no limit": ("self._share(by, 1) * _weight(victim)", "0.0"),
    "a gang that trains is taken": ("_outbids(by, victim) and not victim.begun", "_outbids(by, victim)"),
    "no gang is taken": ("_outbids(by, victim) and not victim.begun", "False"),
    "gangs are taken before spare leases": (
        "next(free, None) or self._take_spare(",
        "next(free, None) or (self._take_gang(standing, offers) if gangs else None) or self._take_spare(",
    ),
    "a gang is taken for what a run could do without": ("if found is None and gangs:", "if found is None:"),
    "only a part of a gang is taken": ("self._evict(gang, ", "self._evict(gang[:1], "),
    "a lease that goes leaves no room": ("            self._free[held.node].update(held.amounts)\n", ""),
    "a lease that goes stays granted": ("            self._granted[victim.run] -= 1\n", ""),
    "room is granted twice": ("        self._free[found.node.id].subtract(found.amounts)\n", ""),
    "leases count for nothing": ("len(held) for run, held in self._kept", "0 for run, held in self._kept"),
}


@cache
def mutant(name: str) -> Any:
    """The module with that defect."""
    return mutated(allotment, name, MUTANTS)
