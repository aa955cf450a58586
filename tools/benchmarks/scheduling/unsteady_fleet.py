"""The real scheduler's core with simulated machines whose batch times vary: noise, drift, and times of slowness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hypha_ray.config import Job
from hypha_ray.scheduler import messages as c
from hypha_ray.scheduler.core import SchedulerCore
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.scheduler.worker_plans import Sizes
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.simulation.world import World
from hypha_ray.types import Event, Plan, Report, SliceInfo, Source

BATCH = 8
"""Samples of a batch."""
SLICE = 256
"""Samples of a slice."""
MESSAGE_S = 0.01
"""Time of a message between a worker and the scheduler."""
FASTEST_S = 0.2
SPREAD = 10.0
"""Seconds per batch of the slowest worker divided by those of the fastest."""
PERIODS_S = (200.0, 600.0)
"""Shortest and longest period of drift."""
SLOW_FACTOR = 4.0
SLOW_S = 120.0
"""Interval for which a straggler is slow."""
DRAWS = 4096
"""Number of batches, and of intervals, whose random numbers are drawn; then they repeat."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Unsteadiness of batch times."""

    noise: float = 0.0
    """Standard deviation of the logarithm of a batch's time."""
    drift: float = 0.0
    """Amplitude of a slow sine, relative to the mean."""
    stragglers: float = 0.0
    """Probability that a machine is slow in an interval."""


class Machine:
    """A machine whose batch times are fixed by the seed, whatever the scheduler does."""

    def __init__(self, seed: int, number: int, conditions: Conditions) -> None:
        dice = np.random.default_rng([seed, number])
        self._base_s = FASTEST_S * SPREAD ** dice.random()
        self._drift = conditions.drift
        self._phase = dice.uniform(0, 2 * np.pi)
        self._period_s = dice.uniform(*PERIODS_S)
        noise = conditions.noise
        self._factors = np.exp(noise * dice.standard_normal(DRAWS) - noise**2 / 2).tolist()
        self._slow = (dice.random(DRAWS) < conditions.stragglers).tolist()

    def seconds(self, batch: int, at: float) -> float:
        """Time of the machine's n-th batch if it begins at that time."""
        seconds: float = self._base_s * self._factors[batch % DRAWS]
        if self._drift:
            seconds *= 1 + self._drift * float(np.sin(self._phase + 2 * np.pi * at / self._period_s))
        if self._slow[int(at / SLOW_S) % DRAWS]:
            seconds *= SLOW_FACTOR
        return seconds


@dataclass(slots=True)
class RoundTiming:
    """Times of a round, and the batches that each machine had done before it."""

    began_at: float
    done: tuple[int, ...]
    ended_at: float = 0.0


class UnsteadyWorker(SimulatedWorker):
    """A worker that begins each batch of its machine once."""

    def _train(self, plan: Plan) -> None:
        assert isinstance(self._world, UnsteadyFleet)
        self._world.begin_batch(self.source.worker, self.round)
        super()._train(plan)


class UnsteadyFleet(World):
    """A run on such machines.

    Args:
        machines: machine of each worker.
        batches: batches of an average worker in a round.
        rounds: number of rounds.
        sync: table `sync` of the job.

    """

    def __init__(
        self, machines: Sequence[Machine], batches: int, rounds: int, sync: dict[str, Any] | None = None
    ) -> None:
        workers = len(machines)
        samples = workers * batches * BATCH
        tables: dict[str, Any] = {
            "run": {"name": "bench"},
            "rounds": {
                "update_rounds": rounds,
                "samples_between_updates": samples,
                "max_batch_size": BATCH,
                "evaluate_every": 0,
            },
            "resources": {"num_workers": workers, "start_deadline_s": 600.0},
            "sync": sync or {},
        }
        super().__init__(Job.model_validate(tables))
        self._machines = machines
        self._done = [0] * workers
        """Batches that each machine has begun."""
        self._batch_s = [0.0] * workers
        """Time of each machine's present batch."""
        self._round = [-1] * workers
        """Round of each machine's present batch."""
        self._timed_s = [0.0] * workers
        self._timed: Counter[int] = Counter()
        """Batches of each worker since its last report, without a round's first one."""
        self.timings: list[RoundTiming] = []
        slices = [SliceInfo(index, "", "", SLICE) for index in range(max(40, 4 * samples // SLICE))]
        core = SchedulerCore(self.job, "bench", slices, Sizes(10_000), ResumePoint())
        self.begin(core, ResumePoint(), c.Initialised(1000, "theta", "layout"), 0.05, workers)

    @property
    def finished_rounds(self) -> list[RoundTiming]:
        """Rounds that have ended, oldest first; the one after the last only ends the workers."""
        return [timing for timing in self.timings if timing.ended_at]

    def new_worker(self, source: Source) -> SimulatedWorker:
        """Make a worker."""
        return UnsteadyWorker(source, self)

    def begin_batch(self, number: int, round: int) -> None:
        """Begin the next batch of a worker's machine."""
        seconds = self._machines[number].seconds(self._done[number], self.now)
        self._batch_s[number] = seconds
        self._done[number] += 1
        if round == self._round[number]:
            self._timed_s[number] += seconds
            self._timed[number] += 1
        self._round[number] = round

    def batch_s(self, source: Source) -> float:
        """Time of the present batch."""
        return self._batch_s[source.worker]

    def delay_s(self, number: int) -> float:
        """Time of a message to or from a worker."""
        return MESSAGE_S

    def say(self, worker: SimulatedWorker, event: Event) -> None:
        """Send a worker's event to the core; a report has the times that the batches really took."""
        if isinstance(event, Report):
            number = worker.source.worker
            event = replace(event, seconds=self._timed_s[number], timed_batches=self._timed[number])
            self._timed_s[number] = 0.0
            self._timed[number] = 0
        super().say(worker, event)

    def obey(self, command: c.Command) -> None:
        """Carry out a command; note when rounds begin and end."""
        match command:
            case c.LogEvent(fields=fields) if fields["kind"] == "plan":
                if not self.timings or self.timings[-1].ended_at:
                    self.timings.append(RoundTiming(self.now, tuple(self._done)))
            case c.Reduce():
                self.timings[-1].ended_at = self.now
        super().obey(command)
