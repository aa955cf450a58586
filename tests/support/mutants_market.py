"""The selection among offers with one defect each."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypha_ray.market import selection
from tests.support.mutation import Defect, attribute, call, drop, mutated, operation

MUTANTS = {
    "the budget is forgotten": Defect("market.selection", "select", operation(">", "False", 2)),
    "the first set may cost anything": Defect("market.selection", "select", operation(">", "False", 1)),
    "an exchange isn't added up": Defect("market.selection", "select", drop("=", 7)),
    "the cheapest gives way": Defect("market.selection", "select", call("reversed", "iter({0})")),
    "one too many is chosen": Defect("market.selection", "select", call("islice", "islice({0}, {1} + 1)")),
    "a node gives one lease": Defect("market.selection", "_ranked", operation("<", "False")),
    "a node gives one too many": Defect("market.selection", "_ranked", operation("+", "{0}", 1)),
    "what is confirmed stays in reserve": Defect("market.selection", "select", call("pop", "{of}.get({0})")),
    "leases on a node don't count": Defect("market.selection", "_rank_of", operation("+", "{0}")),
    "earlier leases don't count": Defect("market.selection", "_rank_of", operation("+", "{1}")),
    "near is far": Defect("market.selection", "_rank_of", operation("not in", "{0} in {1}")),
    "value is price alone": Defect("market.selection", "_rank_of", operation("/", "{0}", 1)),
    "speeds that were measured don't count": Defect("market.selection", "_rank_of", operation("and", "{0}")),
    "price doesn't break ties": Defect("market.selection", "_rank_of", attribute("price", "0", 6)),
}


@cache
def mutant(name: str) -> Any:
    """The module with that defect."""
    (damaged,) = mutated([selection], name, MUTANTS)
    return damaged
