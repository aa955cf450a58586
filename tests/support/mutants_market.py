"""The selection among offers with one defect each: its source with one place changed."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypha_ray.market import selection
from tests.support.mutation import mutated

MUTANTS = {
    "the budget is forgotten": ("            if more > limit:\n                continue\n", ""),
    "the first set may cost anything": ("if total + offers[index].price > limit:", "if False:"),
    "an exchange isn't added up": ("            total = more\n", ""),
    "the cheapest gives way": ("next(reversed(reserve))", "next(iter(reserve))"),
    "one too many is chosen": ("(offer.price,)), wanted):", "(offer.price,)), wanted + 1):"),
    "a node gives one lease": ("if number + 1 < offers[index].room:", "if False:"),
    "a node gives one too many": ("if number + 1 < offers[index].room:", "if number < offers[index].room:"),
    "what is confirmed stays in reserve": ("reserve.pop((index, number), None)", "reserve.get((index, number))"),
    "leases on a node don't count": ("held.get(offer.node.id, 0) + number", "held.get(offer.node.id, 0)"),
    "earlier leases don't count": ("held.get(offer.node.id, 0) + number", "number"),
    "near is far": ("offer.terms.site not in sites", "offer.terms.site in sites"),
    "value is price alone": ("offer.terms.price / (offer.terms.throughput or 1.0)", "offer.terms.price"),
    "speeds that were measured don't count": ('case "value" if stated and not measured:', 'case "value" if stated:'),
    "price doesn't break ties": ("(offer.terms.site not in sites, offer.price)", "(offer.terms.site not in sites, 0)"),
}


@cache
def mutant(name: str) -> Any:
    """The module with that defect."""
    return mutated(selection, name, MUTANTS)
