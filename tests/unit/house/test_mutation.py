"""Defects that are planted by function and operator."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.mutation import (
    Defect,
    Operator,
    attribute,
    call,
    caught,
    condition,
    constant,
    drop,
    iterated,
    mutated,
    operation,
    returned,
    value,
)

SOURCE = """
class Till:
    def __init__(self):
        self.sum, self.taken = 0, []

    def take(self, amounts, least=0):
        for amount in amounts:
            if amount > least and amount < 100:
                self.taken.append(max(amount, 2))
                self.sum += amount
        return self.sum
"""

REWRITTEN = '''
class Till:
    def take(
        self, amounts, least=0
    ):
        """Take them."""
        for coin in amounts:  # One after the other.
            if (
                coin > least
                and coin < 100
            ):
                self.taken.append(
                    max(coin, 2)
                )
                self.sum += coin
        return self.sum

    def __init__(self):
        self.sum, self.taken = 0, []
'''

PLAIN = 6, [2, 5]
"""Sum and list without a defect, of 0, 1, 5 and 100."""

CASES: dict[str, tuple[Operator, int, list[int]]] = {
    "drop an assignment": (drop("sum"), 0, [2, 5]),
    "drop a call": (drop("append"), 6, []),
    "a condition": (condition("True"), 106, [2, 2, 5, 100]),
    "an operator": (operation(">", "{0} >= {1}"), 6, [2, 2, 5]),
    "an operand": (operation("and", "{0}"), 106, [2, 5, 100]),
    "arguments": (call("max", "min({1}, {0})"), 6, [1, 2]),
    "an owner": (call("append", "{of}.insert(0, {0})"), 6, [5, 2]),
    "a result": (returned("{} + 1"), 7, [2, 5]),
    "an iterable": (iterated("{}[2:]"), 5, [5]),
    "a read of the second place": (attribute("sum", "{0}.taken[0]"), 2, [2, 5]),
}


def module(folder: Path, source: str) -> ModuleType:
    made = ModuleType("hypha_ray.market.till")
    made.__file__ = str(folder / "till.py")
    Path(made.__file__).write_text(source, encoding="utf-8")
    return made


def planted(folder: Path, operator: Operator, source: str = SOURCE, function: str = "Till.take") -> Any:
    (damaged,) = mutated([module(folder, source)], "defect", {"defect": Defect("market.till", function, operator)})
    return damaged.Till()


@pytest.mark.parametrize("source", [SOURCE, REWRITTEN], ids=["as it was", "rewritten"])
@pytest.mark.parametrize("case", CASES)
def test_defect_of_a_rewritten_function_is_the_same(tmp_path: Path, case: str, source: str) -> None:
    operator, result, taken = CASES[case]
    till = planted(tmp_path, operator, source)
    assert (result, taken) != PLAIN
    assert (till.take([0, 1, 5, 100]), till.taken) == (result, taken)


@pytest.mark.parametrize(
    ("operator", "function", "reason"),
    [
        (drop("sum"), "Till.give", "Till.give: there is no such function"),
        (drop("total"), "Till.take", "nothing fits 'statement total'"),
        (caught("KeyError"), "Till.take", "nothing fits 'except'"),
        (value("key", "None"), "Till.take", "nothing fits 'value key'"),
        (constant(0, "1"), "", "2 places fit 'constant 0', so say which"),
        (operation("<", "False", 2), "Till.take", "only 1 places fit 'operation <'"),
        (condition("amount_paid > 0"), "Till.take", "the template's names ['amount_paid'] are gone"),
    ],
)
def test_defect_without_its_place_says_which(tmp_path: Path, operator: Operator, function: str, reason: str) -> None:
    with pytest.raises(AssertionError, match="defect: ") as failure:
        planted(tmp_path, operator, function=function)
    assert reason in str(failure.value)


def test_defect_of_another_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="there is no module"):
        mutated([module(tmp_path, SOURCE)], "defect", {"defect": Defect("market.exchange", "", drop("sum"))})
