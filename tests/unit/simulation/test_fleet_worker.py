"""Batches that are one action give the results of batches that are an action each."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypha_ray.simulation.fleet_worker import FleetWorker
from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.scenario import BatchTimes, Machine, MachineGroup, Stragglers
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.types import Plan, Source
from tests.support.scenarios import EXACT, read_text

UNEQUAL = EXACT.replace("count = 2", "count = 4").replace(
    "{ median = 1 }", "{ median = 1, spread = 0.6, drift = 0.3, drift_period_s = 37 }"
)


class StepwiseWorker(FleetWorker):
    """Takes one batch at a time, as its base does."""

    def _train(self, plan: Plan) -> None:
        SimulatedWorker._train(self, plan)


class StepwiseWorld(FleetWorld):
    """World whose workers take one batch at a time."""

    def new_worker(self, source: Source) -> SimulatedWorker:
        machine = self._machine_of[source.worker]
        machine.began_at = self.now
        return StepwiseWorker(source, self, machine)


def finished(world: FleetWorld) -> FleetWorld:
    """The world after a run with a kill, a preemption and a hang in the middle of batches."""
    world.open()
    machines = world.pool.machines
    world.later(17.3, lambda: world.kill(machines[0]))
    world.later(31.7, lambda: world.preempt(machines[1], 5.0, "away"))
    world.later(43.9, lambda: world.hang(machines[2]))
    world.run()
    world.close()
    return world


@pytest.mark.parametrize("strategy", ["diloco", "async"])
def test_results_are_those_of_single_batches(tmp_path: Path, strategy: str) -> None:
    text = UNEQUAL.replace("samples_between_updates = 80", "samples_between_updates = 160")
    (scenario,) = read_text(tmp_path, text + f'[job.sync]\nstrategy = "{strategy}"\n', {"rounds": 8})
    together = finished(FleetWorld(scenario))
    stepwise = finished(StepwiseWorld(scenario))
    assert together.committed_at == pytest.approx(stepwise.committed_at)
    assert together.events == stepwise.events
    assert together.samples == stepwise.samples
    assert together.batches_s == pytest.approx(stepwise.batches_s)
    assert together.waited_s == pytest.approx(stepwise.waited_s)
    assert together.alive_s == pytest.approx(stepwise.alive_s)


def test_skipped_batch_leaves_the_later_ones_as_they_are() -> None:
    times = BatchTimes(median=1.0, jitter=0.3, drift=0.1)
    stragglers = Stragglers(share=0.4, factor=3.0, for_s=2.0)
    group = MachineGroup(count=1, batch_s=times, stragglers=stragglers)
    timed = Machine(3, 0, group, seed=5)
    skipped = Machine(3, 0, group, seed=5)
    for second in range(0, 200, 2):
        timed.batch_s(float(second))
        skipped.skip_batch(float(second))
        assert skipped.batch_s(second + 1.0) == timed.batch_s(second + 1.0)
