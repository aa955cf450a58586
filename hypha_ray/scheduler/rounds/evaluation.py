"""An evaluation of the weights: its shares and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypha_ray.figures import METRIC, Figure, figures_of
from hypha_ray.types import Evaluated, Span, added


@dataclass(slots=True)
class Evaluation:
    """Evaluation of a commit's weights, shared among the workers."""

    weights_round: int
    """Round whose commit has the weights."""
    pending: dict[int, tuple[Span, ...]]
    """Shares that are being evaluated, by worker."""
    lost: list[tuple[Span, ...]] = field(default_factory=list)
    """Shares of lost workers, for workers that join."""
    parts: dict[tuple[Span, ...], Evaluated] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every share is evaluated."""
        return not self.pending and not self.lost

    def take(self, part: Evaluated) -> None:
        """Add a worker's result; one that isn't awaited is ignored."""
        share = self.pending.pop(part.source.worker, None)
        if share is not None:
            self.parts[share] = part

    def lose(self, worker: int) -> None:
        """Put a lost worker's share back."""
        share = self.pending.pop(worker, None)
        if share is not None:
            self.lost.append(share)

    def hand_out(self, worker: int) -> tuple[Span, ...]:
        """Give a lost share to a worker without one; empty if no share is lost."""
        if not self.lost or worker in self.pending:
            return ()
        self.pending[worker] = self.lost.pop()
        return self.pending[worker]

    def record(self, perplexity: bool, metrics: Mapping[str, Figure]) -> dict[str, Any] | None:
        """Figures common to all parts, and the perplexity if wanted; None while a part is missing.

        Args:
            perplexity: whether the loss has a perplexity.
            metrics: the job's own metrics. Their sums may be those of some parts alone, such as of a rare class.

        """
        parts = [part for _, part in sorted(self.parts.items()) if any(weight for _, weight in part.sums.values())]
        if not parts or not self.complete:
            return None
        common = set.intersection(*(set(part.sums) for part in parts))
        total = added(part.sums for part in parts)
        sums = {name: figure for name, figure in total.items() if name in common or name.startswith(METRIC)}
        found = figures_of(sums, perplexity, metrics)
        count = int(max((weight for name, (_, weight) in sums.items() if not name.startswith(METRIC)), default=0))
        seconds = max(part.seconds for part in parts)
        return {"kind": "eval", "round": self.weights_round, **found, "count": count, "seconds": seconds}
