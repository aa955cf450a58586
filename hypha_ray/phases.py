"""Where a step of the weights stands in its round, in runs whose rounds have several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """How far a round of an asynchronous run has come when deltas are reduced.

    `unit` is the weight that a whole round is expected to have; `weight` is what the `arrivals` so far have of it.
    """

    round: int
    size: int
    """Deltas that make the round."""
    unit: int
    arrivals: int = 0
    weight: int = 0
    norms: tuple[float, ...] = ()
    """Of deltas that were accepted lately, by which others are judged."""

    def closes(self, deltas: int) -> bool:
        """Whether the round is whole with so many more."""
        return self.arrivals + deltas >= self.size
