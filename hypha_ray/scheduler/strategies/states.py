"""States of a strategy, each with its evidence.

    Waiting ──begin──► Training ──deltas in──► Reducing ──weights of the next round──► Waiting … ──► Evaluating

Without a barrier deltas are reduced while others train: `Training` is followed by `Waiting`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

R = TypeVar("R")
"""Type of the strategy's rounds."""


@dataclass(frozen=True, slots=True)
class Waiting(Generic[R]):
    """The next round waits for weights, workers or the store."""

    number: int
    before: R | None
    """Round before it; None if it is the first of this attempt."""


@dataclass(slots=True)
class Training(Generic[R]):
    """A round takes deltas."""

    round: R
    grace_until: float | None = None
    """Time at which it closes without missing deltas; None: it waits for all."""


@dataclass(frozen=True, slots=True)
class Reducing(Generic[R]):
    """The round's deltas are in; the weights due in the next one aren't there yet."""

    round: R


@dataclass(frozen=True, slots=True)
class Evaluating(Generic[R]):
    """All rounds are committed; the newest weights are evaluated."""

    round: R


State: TypeAlias = Waiting[R] | Training[R] | Reducing[R] | Evaluating[R]
