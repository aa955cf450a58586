"""Words for people: numbers with their nouns, ranges, and rounds counted from one.

Records and names of files count rounds from zero; consoles, errors and options count them from one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 worker``, ``2 workers``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges(numbers: Iterable[int]) -> list[str]:
    """Write numbers briefly, in order: ``0-7``, ``9``."""
    pairs = groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])
    spans: list[list[int]] = [[number for _, number in pair] for _, pair in pairs]
    return [str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans]


def rounds_text(rounds: Sequence[int]) -> str:
    """Write rounds that are counted from 0 as people count them: ``round 4``, ``rounds 1-3, 7``."""
    noun = "round" if len(rounds) == 1 else "rounds"
    return f"{noun} {', '.join(ranges(round + 1 for round in rounds))}"
