"""The read side of a scheduler's core, for simulations and tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypha_ray.scheduler.fleet.roster import Roster
from hypha_ray.scheduler.strategies.asynchronous import AsyncRounds
from hypha_ray.scheduler.strategies.barrier import BarrierRounds


@dataclass(frozen=True, slots=True)
class FleetView:
    """Workers and rounds of a run, as its core sees them; to be read only."""

    needed: int
    """Workers without which no round begins."""
    roster: Roster
    """Slots of the workers, with their leases and states."""
    strategy: BarrierRounds | AsyncRounds
    """State of the rounds; `strategy.plans.ledger` knows the samples of each worker."""
