"""Scenario files for tests, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.result import SimulationResult, simulate
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.simulation.scenario_file import read_scenarios

EXACT = """
[job.rounds]
update_rounds = 4
samples_between_updates = 80
max_batch_size = 4

[model]
parameters = 1.0e6
sample_bytes = 1
slice_samples = 1024

[[machines]]
count = 2
batch_s = { median = 1 }
start_s = { median = 10 }
up_mbps = 32
down_mbps = 64
price = 3.6

[head]
reduce_gb_s = 0.008
"""
"""Two equal machines with exact times: batches of 1 s, 1 s for a delta, 1 s for the outer step, 0.5 s for weights."""


def read_text(folder: Path, text: str = EXACT, overrides: Mapping[str, Any] | None = None) -> list[Scenario]:
    """Scenarios of a file with this text."""
    file = folder / "scenario.toml"
    file.write_text(text)
    return read_scenarios(str(file), overrides)


def result_of(folder: Path, text: str = EXACT, overrides: Mapping[str, Any] | None = None) -> SimulationResult:
    """Result of the only scenario of a file with this text."""
    (scenario,) = read_text(folder, text, overrides)
    return simulate(scenario)


def opened(folder: Path, text: str = EXACT, overrides: Mapping[str, Any] | None = None) -> FleetWorld:
    """World of the only scenario of a file with this text, at its beginning."""
    (scenario,) = read_text(folder, text, overrides)
    world = FleetWorld(scenario)
    world.open()
    return world
