"""The text gets no denser: a ratchet for each room, and a budget for the kernel's lines and the package's modules."""

from __future__ import annotations

import pytest

from tests.support.density import EMPTY, ceiling, ceilings, counts, measured, sizes

CASES = [
    ("a = 1\nb = a\n", {"statements": 2, "tokens": 6}),
    ('"""Text."""\nimport os\na = 1  # Why.\n', {"statements": 1, "tokens": 3}),
    ("a, b = 1, 2\n", {"statements": 1, "tokens": 7, "tuples": 1}),
    ("a, b = c\n", {"statements": 1, "tokens": 5}),
    ("a = [b for b in c]\n", {"statements": 1, "tokens": 9, "comprehensions": 1}),
    ("a = b if c else d\n", {"statements": 1, "tokens": 7, "conditionals": 1}),
    ("a = b(c(d(e(f(g)))))\n", {"statements": 1, "tokens": 18, "deep": 1}),
    ("a = b(c(d(e(f))))\n", {"statements": 1, "tokens": 15}),
    ("if a(b(c(d(e(f(g)))))):\n    b = 1\n", {"statements": 2, "tokens": 24}),
    ("def f(what):\n    found = what\n", {"statements": 2, "tokens": 9, "empty_names": 2}),
    ("a.found = where\n", {"statements": 1, "tokens": 5}),
]


@pytest.mark.parametrize(("text", "wanted"), CASES, ids=[text.splitlines()[0] for text, _ in CASES])
def test_figures_of_a_few_lines_are_those_counted_by_hand(text: str, wanted: dict[str, int]) -> None:
    assert {name: count for name, count in counts(text).items() if count} == wanted


@pytest.mark.slow
def test_no_room_is_denser_than_it_may_be() -> None:
    denser: list[str] = []
    for room, figures in measured().items():
        for figure, value in figures.items():
            limit = ceiling(room, figure)
            if value > limit:
                denser.append(f"{room}: {figure} {value}, at most {limit}")
    assert denser == []


def test_kernel_and_package_keep_their_budgets() -> None:
    budgets = ceilings()["package"]
    assert {name: size for name, size in sizes().items() if size > budgets[name]} == {}


def test_exceptions_from_the_aims_are_needed_still() -> None:
    """A ceiling that nothing comes near holds nothing."""
    figures = measured()
    loose: list[str] = []
    for room, limits in ceilings().items():
        for figure, limit in limits.items():
            if room != "package" and figures[room][figure] < 0.97 * limit:
                loose.append(f"{room}: {figure}")
    assert loose == [], "run: python tests/support/density.py --lower"


def test_list_of_empty_names_has_names_only() -> None:
    assert all(name.isidentifier() for name in EMPTY)
