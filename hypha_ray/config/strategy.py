"""Strategies of `sync.strategy` and the properties that distinguish them; a new strategy is an entry here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

StrategyName: TypeAlias = Literal["diloco", "async", "sync"]


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """Properties of a strategy that other parts of a run depend on."""

    has_barrier: bool
    """Whether a round waits for its workers' results; otherwise each result is merged as it arrives."""
    sends_gradients: bool
    """Whether a round is one step on the mean gradient; otherwise workers take inner steps and send deltas."""
    own_weights: bool
    """Whether a worker may have weights that differ from the global ones when a round begins."""


STRATEGIES: dict[StrategyName, StrategyTraits] = {
    "diloco": StrategyTraits(has_barrier=True, sends_gradients=False, own_weights=True),
    "async": StrategyTraits(has_barrier=False, sends_gradients=False, own_weights=False),
    "sync": StrategyTraits(has_barrier=True, sends_gradients=True, own_weights=False),
}
