"""The auction's rulings with one defect each."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypha_ray.market import allotment
from tests.support.mutation import Defect, call, drop, mutated, operation, returned, statement

MUTANTS = {
    "the lowest bid is served first": Defect("market.allotment", "Allotment.rulings", operation("-", "{0}")),
    "a lower bid passes a gang that waits": Defect(
        "market.allotment", "Allotment.rulings", statement("break", "continue")
    ),
    "half a gang stays granted": Defect(
        "market.allotment", "Allotment._serve_least", statement("pop", "self._undo.pop()")
    ),
    "shares don't look at bids": Defect("market.allotment", "_weight", call("max", "1.0")),
    "the order by bid is a fair one": Defect(
        "market.allotment", "Allotment._turn", returned("0.0 if {0.0} == '' else {2}")
    ),
    "a bid that is hardly higher takes a lease": Defect("market.allotment", "_outbids", operation("and", "{0}")),
    "an equal bid of nothing takes a lease": Defect("market.allotment", "_outbids", operation("and", "{1}")),
    "a run loses workers that it needs": Defect("market.allotment", "Allotment._spare", operation("-", "{0}", 3)),
    "the earliest lease goes first": Defect(
        "market.allotment", "Allotment._take_spare", call("reversed", "{0.0}[:{0.1.0.1.1}]")
    ),
    "the highest victim goes first": Defect("market.allotment", "Allotment._take_spare", operation("-", "{0}", 1)),
    "a fair share is no limit": Defect("market.allotment", "Allotment._spare", operation("*", "0.0")),
    "a gang that trains is taken": Defect("market.allotment", "Allotment._take_gang", operation("and", "{0}")),
    "no gang is taken": Defect("market.allotment", "Allotment._take_gang", operation("and", "False")),
    "gangs are taken before spare leases": Defect(
        "market.allotment",
        "Allotment._serve_next",
        operation("or", "{0} or (self._take_gang({1.0}, {1.1}) if takes_gangs else None) or {1}"),
    ),
    "a gang is taken for what a run could do without": Defect(
        "market.allotment", "Allotment._serve_next", operation("and", "{0}")
    ),
    "only a part of a gang is taken": Defect(
        "market.allotment", "Allotment._take_gang", call("_evict", "self._evict({0}[:1], {1})")
    ),
    "a lease that goes leaves no room": Defect("market.allotment", "Allotment._evict", drop("give")),
    "a lease that goes stays granted": Defect("market.allotment", "Allotment._evict", drop("_granted")),
    "room is granted twice": Defect("market.allotment", "Allotment._grant", drop("take")),
    "a worker that is granted is missing still": Defect("market.allotment", "Allotment._grant", drop("_missing")),
    "a worker whose lease goes isn't missing": Defect("market.allotment", "Allotment._evict", drop("_missing")),
    "workers that hold leases are missing": Defect(
        "market.allotment", "Allotment._needs_without_lease", drop("subtract")
    ),
    "leases count for nothing": Defect("market.allotment", "Allotment.__init__", call("len", "0")),
}


@cache
def mutant(name: str) -> Any:
    """The module with that defect."""
    (damaged,) = mutated([allotment], name, MUTANTS)
    return damaged
