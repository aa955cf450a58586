"""Orders to a worker and a server: plans, updates of fragments, and the progress of a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from hypha_ray.types.data import Span

WeightsVersion = NewType("WeightsVersion", int)
"""Version of the global weights: round n begins with version n. Without a barrier it counts reductions."""


@dataclass(frozen=True, slots=True)
class Source:
    """Sender of an event: a worker's number, and its incarnation, which grows with every start under that number."""

    run: str
    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one worker in one round: evaluate, train on the spans, then hand over the delta.

    A later version of a round's plan has the same spans at its start. `ahead` is what the next round begins with, for
    while this one's result is on its way. `progress`: where in the schedule its samples begin and end, in rounds.
    """

    round: int
    version: int
    spans: tuple[Span, ...]
    batch_size: int
    evaluate: tuple[Span, ...] = ()
    keep: frozenset[int] = frozenset()
    final: bool = False
    """No more training: evaluate, then end."""
    restores: bool = False
    """Training waits for the inner state of the worker's predecessor, which is on its way."""
    ahead: tuple[Span, ...] = ()
    progress: tuple[float, float] | None = None
    rejections: int = 0
    """Deltas of this incarnation that were rejected; after each one its inner state begins anew."""

    @property
    def samples(self) -> int:
        """Samples to train on in this round."""
        return sum(span.samples for span in self.spans)

    @property
    def batches(self) -> int:
        """Batches to train on in this round; the last one may be short."""
        return -(-self.samples // self.batch_size)


@dataclass(frozen=True, slots=True)
class FragmentUpdate:
    """One fragment of new global weights.

    Args:
        version: version of the weights.
        fragment: index of the fragment.
        of: number of fragments that a worker is sent of this version.
        whole: whether they are all fragments, for a worker that drops its own weights; otherwise the changed ones.
        difference: whether the payload is the coded difference to the fragment's weights before.

    """

    version: WeightsVersion
    fragment: int
    of: int = 1
    whole: bool = True
    difference: bool = False


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """Progress of a round of an asynchronous run when deltas are reduced.

    `unit` is the weight that a whole round is expected to have; `weight` is what the `arrivals` so far have of it.
    """

    round: int
    size: int
    """Deltas that make the round."""
    unit: int
    arrivals: int = 0
    weight: int = 0
    norms: tuple[float, ...] = ()
    """Norms of recently accepted deltas, by which others are judged."""

    def closes(self, deltas: int) -> bool:
        """Whether the round is whole with so many more."""
        return self.arrivals + deltas >= self.size
