"""Rules of a reduction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from hypha_ray.codec import Codec, Fp32
from hypha_ray.config.schema import OuterOptimizer, Sync
from hypha_ray.types import Flat, Layout, RoundProgress


class OptimizerStep(Protocol):
    """An optimizer that makes its step on a mean gradient."""

    def step(self, round: int, theta: Flat, state: Flat, out: Flat) -> Flat:
        """Write new weights over the mean gradient in `out`, and return the new state."""
        ...


@dataclass(frozen=True, slots=True)
class ReduceSpec:
    """Rules of a reduction."""

    layout: Layout
    fragment: int
    outer: OuterOptimizer
    sync: Sync = field(default_factory=Sync)
    """Merge rule, weighting, norm gate and clipping."""
    codec: Codec = field(default_factory=Fp32)
    optimizer_step: OptimizerStep | None = None
    """Payloads are gradients, and this makes the outer step; None: they are deltas, and `outer` makes it."""
    rounds: int = 1
    """Rounds of the whole run, for the schedule of the outer learning rate."""
    turn: int | None = None
    """Steps that the fragment has made before; None: one in each round."""
    threads: int = 1
    """Blocks of memory that are worked on at a time; changes no bit."""
    phase: RoundProgress | None = None
    """Rounds have several steps, and this is one of them; None: they have one."""
    wanted: Literal["all", "theta", "state"] = "all"
    """Results that are wanted; the others may be left out if that is quicker."""

    @property
    def averages_deltas(self) -> bool:
        """Whether deltas are added up and divided by their number, as in an all-reduce, and all weigh alike.

        Or else a running mean is kept, of weights where they come as such: that of equal ones is exact, and so is a
        step that puts the mean itself in the place of θ.
        """
        replaces = self.outer.name == "average" or (self.outer.learning_rate, self.outer.momentum) == (1, 0)
        return (self.sync.weighting, self.sync.merge) == ("uniform", "mean") and not replaces

    @property
    def known_norms(self) -> tuple[float, ...]:
        """Norms of deltas that were accepted lately, where those that come together are too few to judge by."""
        return () if self.phase is None else self.phase.norms
