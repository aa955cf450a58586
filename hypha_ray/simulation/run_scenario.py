"""Scenario of a run: its job, or one with other settings, on machines that are like those of its records.

The world of a recorded run is that of a scenario, with the times of its records that no size or rate gives.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median, pstdev
from typing import ClassVar, Final

import numpy as np
from pydantic import Field

from hypha_ray.config import Job
from hypha_ray.config.schema import Testing
from hypha_ray.config.value_types import NotNegative, Table
from hypha_ray.errors import ConfigError
from hypha_ray.exchange_schedule import is_last_round
from hypha_ray.scheduler import messages as c
from hypha_ray.simulation.calibration import Calibration, WorkerFit
from hypha_ray.simulation.exchange import ALL_VISIBLE, MOST_BITS, PayloadSizes
from hypha_ray.simulation.fleet_worker import FleetWorker
from hypha_ray.simulation.fleet_world import FleetWorld
from hypha_ray.simulation.result import SimulationResult, result_of
from hypha_ray.simulation.scenario import (
    BatchTimes,
    FailureKinds,
    Failures,
    Head,
    MachineGroup,
    ModelSize,
    Scenario,
    Site,
    StartTimes,
)
from hypha_ray.simulation.worker import SimulatedWorker
from hypha_ray.types import Delta, Event, Left, Plan, SliceInfo, Source, samples_of

_KILL: Final = re.compile(r"worker\.step(?::(?P<worker>\d+))?=kill@(?P<hits>\d+(?:,\d+)*)")
"""Failpoint that kills a worker after some of its steps."""
SITE = "run"
"""Name of the site of all machines of a run."""
SHORTEST_S = 1e-6
"""Seconds that replace a time of 0 in a scenario, whose times are above 0."""
FLOAT32_BYTES = 4


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

    groups_workers: ClassVar[bool] = True

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

    def _spend_batch(self, seconds: float, on_end: Callable[[], None]) -> None:
        def end() -> None:
            world = self._accounts
            assert isinstance(world, RecordedWorld)
            if not world.ends_at_step(self):
                on_end()

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


@dataclass(frozen=True, slots=True)
class DataSize:
    """Sizes of the run's model and data, where they are known beside its records."""

    sample_bytes: int | None = None
    """Bytes of a sample in a slice; None if the dataset isn't there."""
    slice_samples: int | None = None
    """Samples of a slice; None if the dataset isn't there."""
    epoch_samples: int | None = None
    """Train samples of an epoch, if it is a mixture's; None if there is one dataset, or their sizes aren't known."""
    fragment_parameters: tuple[int, ...] = ()
    """Parameters of each fragment; empty: they are taken to be even."""
    notes: tuple[str, ...] = ()
    """Limits of these sizes."""


def scenario_of(fit: Calibration, job: Job, sizes: DataSize, seed: int) -> RecordedScenario:
    """Describe the run as a scenario.

    Args:
        fit: the run.
        job: its job, or one with other settings.
        sizes: sizes of the model and data under that job.
        seed: seed of all that is random.

    Raises:
        ConfigError: SIM003, the run doesn't tell how long batches are under that job.

    """
    recorded_times = RecordedTimes(
        merge_s=fit.typical("merge_s"),
        hand_over_s=hand_over_s(fit),
        reduce_s=fit.typical("reduce_s"),
        commit_s=fit.typical("commit_s"),
        evaluate_sample_s=_evaluate_sample_s(fit),
        validation_samples=fit.samples.get("validation", 0),
        fragment_parameters=sizes.fragment_parameters,
        visible_shares=visible_shares(fit),
    )
    return RecordedScenario(
        name=fit.name,
        seed=seed,
        job=_with_all_rounds(job),
        model=_model_size(fit, sizes),
        machines=tuple(_machine(fit, job, number) for number in range(job.num_workers)),
        sites=(Site(name=SITE),),
        head=Head(site=SITE),
        recorded=recorded_times,
    )


def _with_all_rounds(job: Job) -> Job:
    """The job without patience: no loss is simulated that could become better."""
    return job.model_copy(update={"rounds": job.rounds.model_copy(update={"patience": None})})


def scenario_notes(fit: Calibration, job: Job, sizes: DataSize) -> list[str]:
    """Assumptions of a scenario's figures, beside the run's own records."""
    notes = list(sizes.notes)
    recorded_workers = len(fit.workers)
    if job.num_workers > recorded_workers:
        notes.append(
            f"workers {recorded_workers} … {job.num_workers - 1} are taken to be like those of the run, in turn"
        )
    if job.sync.codec != fit.job.sync.codec:
        notes.append(
            f"bytes of {job.sync.codec} are those of the codec's own format; "
            f"its time to encode is taken to be that of {fit.job.sync.codec}"
        )
    if job.rounds.max_batch_size != fit.job.rounds.max_batch_size:
        notes.append("batches of another size are taken to be as long as their samples are many")
    if job.rounds.patience is not None:
        notes.append("all rounds are simulated: whether rounds.patience ends a run before, no time tells")
    if not job.sync.traits.has_barrier:
        notes.append("the run had a barrier: times without one are the simulation's alone")
    if unknown_names := unknown_failpoints(job.testing.failpoints):
        notes.append(f"testing.failpoints {', '.join(unknown_names)} are left out")
    return notes


def visible_shares(fit: Calibration) -> tuple[float, float]:
    """Parts of the bytes of `bf16` that the run's payloads took, up and down; medians over rounds, without the last.

    A direction in which the run has another codec than `visible` has 1.
    """
    sizes = PayloadSizes(fit.job, fit.parameter_bytes // FLOAT32_BYTES)
    upward: list[float] = []
    downward: list[float] = []
    for actual in fit.rounds:
        if not actual.deltas or is_last_round(fit.job, actual.number):
            continue
        if fit.job.sync.codec in MOST_BITS:
            upward.append(actual.bytes_up / (actual.deltas * sizes.delta_bytes(actual.number)))
        if fit.job.sync.downward_codec in MOST_BITS:
            downward.append(actual.bytes_down / (actual.deltas * sizes.coded_bytes(actual.number)))
    return min(1.0, median(upward or [1.0])), min(1.0, median(downward or [1.0]))


def _model_size(fit: Calibration, sizes: DataSize) -> ModelSize:
    samples = sizes.epoch_samples or fit.samples.get("train")
    model_size = ModelSize(parameters=fit.parameter_bytes // FLOAT32_BYTES, samples=samples)
    if sizes.sample_bytes is None or sizes.slice_samples is None:
        return model_size
    return model_size.model_copy(update={"sample_bytes": sizes.sample_bytes, "slice_samples": sizes.slice_samples})


def _machine(fit: Calibration, job: Job, worker_number: int) -> MachineGroup:
    """The machine of a worker; one that the run didn't have is like one that it had."""
    worker = fit.workers[worker_number % len(fit.workers)]
    mean_s = mean_batch_s(fit.job, job, worker, worker_number)
    return MachineGroup(
        count=1,
        batch_s=BatchTimes(
            median=mean_s / exp(worker.jitter**2 / 2),  # The mean of a log-normal time is that of the run.
            jitter=worker.jitter,
            drift=worker.drift,
            drift_period_s=max(fit.seconds, SHORTEST_S),
        ),
        start_s=_start(fit.starts_s),
        failures=_failures(fit),
        price=worker.price or 0.0,
    )


def mean_batch_s(base: Job, job: Job, worker: WorkerFit, worker_number: int) -> float:
    """Mean seconds of a worker's batch under a job, by those under the base job.

    Raises:
        ConfigError: SIM003, a floor of ``[testing]`` hides how long the batches would be.

    """
    slowdown, floor_s = _throttle(base.testing, worker.worker)
    new_slowdown, new_floor_s = _throttle(job.testing, worker_number)
    if (slowdown, floor_s) == (new_slowdown, new_floor_s) and floor_s:
        return worker.mean_s
    if floor_s and (new_floor_s < floor_s or slowdown != new_slowdown):
        got = f"at least {floor_s:g} s for each batch of worker {worker.worker}"
        problem = "the run's own [testing] hides how long batches are without it"
        raise ConfigError("SIM003", problem, got, fix="take a run without it, or try longer times")
    if floor_s:
        return worker.mean_s + new_floor_s - floor_s
    batch_ratio = job.rounds.max_batch_size / base.rounds.max_batch_size
    return max(worker.mean_s / slowdown * batch_ratio * new_slowdown, new_floor_s)


def _throttle(testing: Testing, worker: int) -> tuple[float, float]:
    """Factor and least seconds of a worker's batches, as `Throttle` of a worker has them."""
    slowdown = testing.slowdown[worker] if worker < len(testing.slowdown) else 1.0
    times = testing.batch_times_s
    floor_s = times[worker] if worker < len(times) else testing.batch_s or 0.0
    return slowdown, floor_s


def _start(starts_s: Sequence[float]) -> StartTimes:
    if not starts_s:
        return StartTimes(median=SHORTEST_S)
    logarithms = [log(max(seconds, SHORTEST_S)) for seconds in starts_s]
    return StartTimes(median=exp(median(logarithms)), spread=pstdev(logarithms))


def hand_over_s(fit: Calibration) -> float:
    """Seconds of a round besides batches, evaluation and merge; from rounds without an evaluation if there are any."""
    plain_seconds: list[float] = []
    after_evaluation: list[float] = []
    for times in fit.times[1:]:
        overheads = after_evaluation if times.evaluate_s else plain_seconds
        overheads.append(times.overhead_s)
    return max(0.0, median(plain_seconds or after_evaluation) - fit.typical("merge_s"))


def _evaluate_sample_s(fit: Calibration) -> tuple[float, ...]:
    """Seconds of each worker for a validation sample; shares follow speeds, and all end together.

    Records have the slowest worker's time, and a round's last worker may have been a faster one: time that a round
    doesn't have is taken off.
    """
    samples = fit.samples.get("validation", 0)
    besides_batches: list[float] = []
    for times in fit.times:
        if times.evaluate_s:
            besides_batches.append(times.evaluate_s + times.overhead_s)
    if not samples or not besides_batches:
        return ()
    evaluate_s = max(0.0, median(besides_batches) - fit.typical("merge_s") - hand_over_s(fit))
    speeds = np.array([1 / worker.mean_s for worker in fit.workers])
    shares = samples * speeds / speeds.sum()
    return tuple((evaluate_s / shares).tolist())


def _failures(fit: Calibration) -> Failures:
    """Failures at the rate of the run's own, in its proportions of kinds; none that were failpoints."""
    loss_count = sum(fit.losses.values())
    if not loss_count or kills_of(fit.job.testing.failpoints):
        return Failures()
    kinds = FailureKinds.model_validate(dict(fit.losses), strict=False)
    return Failures(every_h=fit.worker_hours / loss_count, kinds=kinds)
