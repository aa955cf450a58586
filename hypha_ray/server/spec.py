"""Rules of a reduction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from hypha_ray.codec import Codec, Fp32
from hypha_ray.config.schema import Sync
from hypha_ray.config.tables.optimizers import OuterOptimizer
from hypha_ray.plugins import is_own
from hypha_ray.types import Flat, Layout, RoundProgress


class OptimizerStep(Protocol):
    """An optimizer of synchronous steps."""

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
    """Optimizer for payloads that are gradients; None: they are deltas, and `outer` takes the step."""
    rounds: int = 1
    """Number of rounds in the run, for the schedule of the outer learning rate."""
    turn: int | None = None
    """Number of the fragment's earlier steps; None: one in each round."""
    threads: int = 1
    """Number of memory blocks processed at a time; changes no bit."""
    phase: RoundProgress | None = None
    """Progress of the round before this step; None if a round has only one step."""
    wanted: Literal["all", "theta", "state"] = "all"
    """Results that must be complete; the others may be incomplete if that is faster."""

    @property
    def averages_deltas(self) -> bool:
        """Whether the mean is a sum of equally weighted deltas divided by their number, as in an all-reduce.

        Otherwise it is a running mean of the payloads' values, weights included. That of equal values is exact, and so
        is a step that replaces θ by the mean.
        """
        replaces = self.outer.name == "average" or (self.outer.learning_rate, self.outer.momentum) == (1, 0)
        return (self.sync.weighting, self.sync.merge) == ("uniform", "mean") and not replaces

    @property
    def takes_deltas(self) -> bool:
        """Whether deltas are merged even if payloads are weights, as users' own rules expect."""
        return self.averages_deltas or is_own("merge_rules", self.sync.merge)

    @property
    def known_norms(self) -> tuple[float, ...]:
        """Norms of recently accepted deltas, for rounds of several steps, whose deltas arrive one by one."""
        return () if self.phase is None else self.phase.norms
