"""Figures as sums, which add up over micro-batches, reports and workers; a mean is made where a record is written."""

from __future__ import annotations

from collections.abc import Iterable

Sums = dict[str, tuple[float, float]]
"""A figure's name to its sum and its weight, of which the figure is the quotient."""


def added(parts: Iterable[Sums]) -> Sums:
    """Sums and weights of all parts together; a figure that a part lacks has no weight there."""
    found: Sums = {}
    for part in parts:
        for name, (value, weight) in part.items():
            before, weight_before = found.get(name, (0.0, 0.0))
            found[name] = before + value, weight_before + weight
    return found


def means(sums: Sums) -> dict[str, float]:
    """Each sum divided by its weight; a figure without weight is left out."""
    return {name: value / weight for name, (value, weight) in sums.items() if weight}
