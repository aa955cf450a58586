"""Thinning of long curves and lists for a page: it keeps the ends and the extremes, and never averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def kept_points(values: Sequence[float], most: int) -> list[int]:
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
    kept = {0, len(values) - 1}
    for piece in _pieces(len(values), (most - 2) // 2):
        present = [place for place in piece if not math.isnan(values[place])]
        if present:
            kept.add(min(present, key=values.__getitem__))
            kept.add(max(present, key=values.__getitem__))
        else:
            kept.add(piece[0])
    return sorted(kept)


def spread(length: int, most: int) -> list[int]:
    """Return evenly spread places of a list, with the first and the last one; all if there are no more than `most`."""
    if length <= most:
        return list(range(length))
    return sorted({round(number * (length - 1) / (most - 1)) for number in range(most)})


def bins(length: int, most: int) -> list[range]:
    """Cut a list into at most so many runs of neighbours; of one each if there are no more."""
    return list(_pieces(length, min(length, most)))


def _pieces(length: int, number: int) -> Iterator[range]:
    """Cut places into pieces of equal length, as far as possible."""
    for piece in range(number):
        yield range(piece * length // number, (piece + 1) * length // number)
