"""World of a recorded run: as that of a scenario, with the times of its records that no size or rate gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from pydantic import Field

from hypha_ray.config.value_types import NotNegative, Table
from hypha_ray.scheduler import messages as c
from hypha_ray.simulation.fleet_worker import FleetWorker
from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.payload_sizes import ALL_VISIBLE
from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.run import result_of
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.types import Delta, Event, Left, Plan, SliceInfo, Source, samples_of

_KILL: Final = re.compile(r"worker\.step(?::(?P<worker>\d+))?=kill@(?P<hits>\d+(?:,\d+)*)")
"""Failpoint that kills a worker after some of its steps."""


class RecordedTimes(Table):
    """Times of a run beside its batches, in seconds, and sizes that its records have."""

    merge_s: NotNegative = Field(0.0, description="from new weights to the worker that has merged them")
    hand_over_s: NotNegative = Field(0.0, description="from the last batch to the delta that the scheduler knows of")
    reduce_s: NotNegative = Field(0.0, description="from the last delta to new weights, beside the links")
    commit_s: NotNegative = Field(0.0, description="from new weights to the commit")
    evaluate_sample_s: tuple[NotNegative, ...] = Field(
        (), strict=False, description="of a validation sample, by worker"
    )
    validation_samples: int = Field(0, ge=0, description="samples of an evaluation")
    fragment_parameters: tuple[int, ...] = Field((), strict=False, description="of each fragment; default: even parts")
    visible_shares: tuple[float, float] = Field(
        ALL_VISIBLE, strict=False, description="of bf16's bytes that the codec visible takes, up and down"
    )


class RecordedScenario(Scenario):
    """Scenario of a recorded run."""

    recorded: RecordedTimes = Field(RecordedTimes(), description="times of the run's records")


def simulate_recorded(scenario: RecordedScenario) -> SimulationResult:
    """Simulate a recorded run to its end. Equal scenarios give equal results."""
    world = RecordedWorld(scenario)
    world.open()
    world.run()
    world.close()
    return result_of(world)


class RecordedWorld(FleetWorld):
    """World of a recorded run.

    Args:
        scenario: the run as a scenario.

    """

    def __init__(self, scenario: RecordedScenario) -> None:
        super().__init__(scenario)
        self._times = scenario.recorded
        self._kills = kills_of(scenario.job.testing.failpoints)
        self._steps: Counter[str] = Counter()
        """Number of steps at each failpoint, over all its workers."""
        if self._times.fragment_parameters:
            self.sizes.fragments = list(self._times.fragment_parameters)
        self.sizes.visible_shares = self._times.visible_shares
        if self._times.validation_samples:
            validation = SliceInfo(len(self._slices), "", "", self._times.validation_samples, "validation")
            self._slices.append(validation)

    def new_worker(self, source: Source) -> SimulatedWorker:
        """Make a worker on its machine, which may be killed at a failpoint."""
        worker = super().new_worker(source)
        assert isinstance(worker, FleetWorker)
        if self._kills_of(source):
            return DoomedWorker(source, self, worker.machine)
        return worker

    def evaluate_s(self, source: Source) -> float:
        """Seconds of a worker's share of an evaluation."""
        rates = self._times.evaluate_sample_s
        plan = self.workers[source.worker].plan
        if not rates or plan is None:
            return 0.0
        return rates[source.worker % len(rates)] * samples_of(plan.evaluate)

    def send(self, command: c.Order) -> None:
        """Send an order; weights are merged a while later."""
        if isinstance(command, c.Merge):
            self.later(self._times.merge_s, lambda: super(RecordedWorld, self).send(command))
        else:
            super().send(command)

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """Send a worker's event; a delta is handed over first, and nothing overtakes it."""
        if isinstance(event, Delta | Left):
            self.later(self._times.hand_over_s, lambda: super(RecordedWorld, self).say(worker, event))
        else:
            super().say(worker, event)

    def _reduce_s(self, command: c.Reduce) -> float:
        """Seconds of a reduction whose payloads have all arrived."""
        return super()._reduce_s(command) + self._times.reduce_s

    def commit_s(self, round: int) -> float:
        """Seconds of a round's commit."""
        return self._times.commit_s

    def ends_at_step(self, worker: FleetWorker) -> bool:
        """Count a worker's step; kill the worker if a failpoint says so, and return whether it did."""
        for name in self._kills_of(worker.source):
            self._steps[name] += 1
            if self._steps[name] in self._kills[name]:
                self.kill(worker.machine)
                return True
        return False

    def _kills_of(self, source: Source) -> list[str]:
        """Names of the failpoints that a worker comes to."""
        return [name for name in self._kills if name in ("", str(source.worker))]


class DoomedWorker(FleetWorker):
    """Worker that comes to a failpoint after each step, so each batch is an action of its own."""

    def _train(self, plan: Plan) -> None:
        SimulatedWorker._train(self, plan)

    def _spend_batch(self, seconds: float, then: Callable[[], None]) -> None:
        def end() -> None:
            world = self._accounts
            assert isinstance(world, RecordedWorld)
            if not world.ends_at_step(self):
                then()

        super()._spend_batch(seconds, end)


def kills_of(failpoints: Sequence[str]) -> dict[str, frozenset[int]]:
    """Steps after which a worker is killed, by its number as text; that of all workers is empty."""
    kills: dict[str, frozenset[int]] = {}
    for spec in failpoints:
        match = _KILL.fullmatch(spec)
        if match is not None:
            name = match["worker"] or ""
            kills[name] = kills.get(name, frozenset()) | frozenset(map(int, match["hits"].split(",")))
    return kills


def unknown_failpoints(failpoints: Sequence[str]) -> list[str]:
    """Failpoints that a simulation doesn't carry out."""
    return [spec for spec in failpoints if _KILL.fullmatch(spec) is None]
