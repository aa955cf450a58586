"""Generated problems: short prompts of digits whose answers are known, for reinforcement learning on a small machine.

    copy3      481=      481        sums          7+5=      12
    reverse3   481=      184        sums2         38+4=     42
    sort3      481=      148        remainders    7+5=      2
    max3       481=      8          remainders2   38+4=     2

The number behind a name is that of the digits, 1 to 9; those of `sums` and `remainders` have up to so many.
Remainders are sums modulo ten.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import numpy as np

from hypha_ray.errors import DataError

ALPHABET: Final = "0123456789+-*= "
"""Characters of all problems, so that models of one vocabulary can be trained on any of them."""

Problem: TypeAlias = tuple[str, str]
"""Prompt and answer."""

_OF_DIGITS: Final[dict[str, Callable[[str], str]]] = {
    "copy": lambda digits: digits,
    "reverse": lambda digits: digits[::-1],
    "sort": lambda digits: "".join(sorted(digits)),
    "max": max,
}
_OF_TWO_NUMBERS: Final[dict[str, Callable[[int, int], int]]] = {
    "sums": lambda a, b: a + b,
    "remainders": lambda a, b: (a + b) % 10,
}
_NAME = re.compile(r"([a-z]+)([1-9]?)")


def problems(name: str, seed: int) -> Iterator[Problem]:
    """Problems without end; the same seed gives the same ones. Each is drawn anew, so small tasks repeat theirs.

    Args:
        name: kind and number of digits, such as ``sort2``; without a number 2 digits, and 1 of sums and remainders.
        seed: seed of the draws.

    Raises:
        DataError: there are no such problems.

    """
    match = _NAME.fullmatch(name)
    kind, digits = match.groups() if match else (name, "")
    generator = np.random.default_rng(seed)
    if kind in _OF_DIGITS:
        return _of_digits(_OF_DIGITS[kind], int(digits or 2), generator)
    if kind in _OF_TWO_NUMBERS:
        return _of_two_numbers(_OF_TWO_NUMBERS[kind], int(digits or 1), generator)
    kinds = [*_OF_DIGITS, *_OF_TWO_NUMBERS]
    near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
    allowed = f"{', '.join(kinds)}, with the number of digits behind it, 1 to 9"
    fix = f"did you mean {near[0]!r}?" if near else "such as problems:sort2"
    raise DataError("DATA030", f"there are no problems {name!r}", name, allowed, fix)


def _of_digits(answer: Callable[[str], str], length: int, generator: np.random.Generator) -> Iterator[Problem]:
    while True:
        digits = "".join(map(str, generator.integers(10, size=length)))
        yield f"{digits}=", answer(digits)


def _of_two_numbers(
    answer: Callable[[int, int], int], length: int, generator: np.random.Generator
) -> Iterator[Problem]:
    while True:
        a, b = map(int, generator.integers(10**length, size=2))
        yield f"{a}+{b}=", str(answer(a, b))
