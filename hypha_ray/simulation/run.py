"""Simulation of one scenario: the scheduler's core on a virtual clock, and the figures of the run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from hypha_ray.errors import HyphaError
from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.payload_sizes import size_notes
from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.scenario import Scenario

OnRound = Callable[[Mapping[str, Any]], None]
"""Called with the record of each round, as soon as it is there."""


def simulate(scenario: Scenario, on_round: OnRound | None = None) -> SimulationResult:
    """Simulate a run to its end. Equal scenarios give equal results.

    Args:
        scenario: the scenario, as `read_scenarios` gives it.
        on_round: called with the record of each round.

    Raises:
        HyphaError: a fault of the scenario's files; the end of a simulated run by lack of machines is a result.

    """
    world = FleetWorld(scenario)
    world.on_round = on_round
    searches = gc.isenabled()
    gc.disable()  # The world's objects form no cycles before its end.
    try:
        world.open()
        world.run()
        world.close()
    finally:
        if searches:
            gc.enable()
    return result_of(world)


def result_of(world: FleetWorld) -> SimulationResult:
    """Figures of a run that has ended."""
    scenario = world.scenario
    ends = [0.0, *world.committed_at]
    alive_s = world.alive_s or 1.0
    failure = world.failure
    if failure is not None and not isinstance(failure, HyphaError):
        raise failure
    return SimulationResult(
        settings=scenario.settings(),
        rounds=len(world.committed_at),
        time_s=ends[-1] if world.committed_at else world.now,
        bytes_up=world.traffic.bytes_up,
        bytes_down=world.traffic.bytes_down,
        bytes_slices=world.traffic.bytes_slices,
        utilisation=world.batches_s / alive_s,
        idle_fraction=world.waited_s / alive_s,
        goodput=_goodput(world),
        cost=world.cost(),
        samples=world.samples,
        events=dict(sorted(world.events.items())),
        round_s=tuple(stop - start for start, stop in pairwise(ends)),
        round_metrics=tuple(world.records),
        failure=None if failure is None else failure.what,
        notes=size_notes(scenario.job, world.sizes.visible_shares),
    )


def _goodput(world: FleetWorld) -> float:
    """Committed samples ÷ those of all machines if each trained from its start to the end."""
    batch_size = world.job.rounds.max_batch_size
    possible = 0.0
    for machine in world.pool.machines:
        if machine.began_at is not None:
            possible += (world.now - machine.began_at) / machine.nominal_batch_s * batch_size
    return world.samples / possible if possible else 0.0
