"""Growth of processes: a straight line through their memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Life: TypeAlias = Sequence[tuple[float, float]]
"""One process: seconds, and megabytes at that time."""
SETTLED_S = 60.0
"""The first seconds of a process aren't counted: it loads its libraries, and fills what it keeps at hand."""


def settled(life: Life, settled_s: float = SETTLED_S) -> Life:
    """A life without its first seconds."""
    return [(at, size) for at, size in life if at - life[0][0] >= settled_s]


def slope_per_hour(lives: Iterable[Life]) -> float | None:
    """Least squares, in megabytes per hour.

    All lives have one slope and each its own level, so a process that was killed and replaced doesn't look like one
    that shrank. None: no life has two moments.
    """
    covariance = 0.0
    variance = 0.0
    for life in lives:
        if life:
            mean_at = sum(at for at, _ in life) / len(life)
            mean_size = sum(size for _, size in life) / len(life)
            covariance += sum((at - mean_at) * (size - mean_size) for at, size in life)
            variance += sum((at - mean_at) ** 2 for at, _ in life)
    if not variance:
        return None
    return covariance / variance * 3600
