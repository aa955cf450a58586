"""Thinning of long curves and lists for a page: it keeps the ends and the extremes, and never averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def points_to_draw(values: Sequence[float], most: int) -> list[int]:
    """Return the places of the points of a curve that are drawn.

    The curve is cut into pieces of equal length, and each keeps its least and its greatest value. A piece without any
    keeps its first point, so that the gap is seen.

    Args:
        values: the curve; NaN: there is no value.
        most: number of points that is about the most, at least 4.

    Returns:
        All places if there are no more than that; otherwise some of them, in order, with the first and the last one.

    """
    if len(values) <= most:
        return list(range(len(values)))
    drawn = {0, len(values) - 1}
    for piece in cut(len(values), (most - 2) // 2):
        present = [point for point in piece if not math.isnan(values[point])]
        if present:
            drawn.add(min(present, key=values.__getitem__))
            drawn.add(max(present, key=values.__getitem__))
        else:
            drawn.add(piece[0])
    return sorted(drawn)


def spread(elements: Sequence[T], most: int) -> list[T]:
    """Return evenly spread elements, with the first and the last one; all if there are no more than `most`."""
    if len(elements) <= most:
        return list(elements)
    step = (len(elements) - 1) / (most - 1)
    return [elements[round(number * step)] for number in range(most)]


def cut(length: int, most: int) -> Iterator[range]:
    """Cut the places of a list into pieces of equal length, as far as possible: at most so many, of one at least."""
    pieces = min(length, max(1, most))
    for piece in range(pieces):
        yield range(piece * length // pieces, (piece + 1) * length // pieces)
