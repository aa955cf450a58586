"""Scenario of a run: its job, or one with other settings, on machines that are like those of its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median, pstdev

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.schema import Testing
from hypha_ray.errors import ConfigError
from hypha_ray.exchange_schedule import is_last_round
from hypha_ray.simulation.calibration import Calibration, WorkerFit
from hypha_ray.simulation.payload_sizes import MOST_BITS, PayloadSizes
from hypha_ray.simulation.scenario import (
    BatchTimes,
    FailureKinds,
    Failures,
    Head,
    MachineGroup,
    ModelSize,
    Site,
    StartTimes,
)
from hypha_ray.simulation.what_if.recorded_world import RecordedScenario, RecordedTimes, kills_of, unknown_failpoints

SITE = "run"
"""Name of the site of all machines of a run."""
SHORTEST_S = 1e-6
"""Seconds that stand for no time in a scenario, whose times are above 0."""
FLOAT32_BYTES = 4
UNTOLD: tuple[tuple[str, ...], ...] = (
    ("model",),
    ("preprocessor",),
    ("dataset",),
    ("rl",),
    ("bridge",),
    ("inner_optimizer", "name"),
    ("worker", "device"),
    ("worker", "processes"),
    ("worker", "sharding"),
    ("worker", "autocast"),
    ("worker", "compile"),
    ("worker", "attention"),
    ("worker", "gradient_checkpointing"),
    ("worker", "fused_loss"),
    ("rounds", "accumulation"),
)
"""Tables and keys that change the time of a batch in a way that no record of another setting tells."""


@dataclass(frozen=True, slots=True)
class DataSize:
    """Sizes of the run's model and data, where they are known beside its records."""

    sample_bytes: int | None = None
    """Bytes of a sample in a slice; None if the dataset isn't there."""
    slice_samples: int | None = None
    """Samples of a slice; None if the dataset isn't there."""
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
    recorded = RecordedTimes(
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
        job=job,
        model=_model_size(fit, sizes),
        machines=tuple(_machine(fit, job, number) for number in range(job.num_workers)),
        sites=(Site(name=SITE),),
        head=Head(site=SITE),
        recorded=recorded,
    )


def scenario_notes(fit: Calibration, job: Job, sizes: DataSize) -> list[str]:
    """Assumptions of a scenario's figures, beside the run's own records."""
    notes = list(sizes.notes)
    recorded = len(fit.workers)
    if job.num_workers > recorded:
        notes.append(f"workers {recorded} … {job.num_workers - 1} are taken to be like those of the run, in turn")
    if job.sync.codec != fit.job.sync.codec:
        notes.append(
            f"bytes of {job.sync.codec} are those of the codec's own format; "
            f"its time to encode is taken to be that of {fit.job.sync.codec}"
        )
    if job.rounds.max_batch_size != fit.job.rounds.max_batch_size:
        notes.append("batches of another size are taken to be as long as their samples are many")
    if not job.sync.traits.has_barrier:
        notes.append("the run had a barrier: times without one are the simulation's alone")
    if unknown := unknown_failpoints(job.testing.failpoints):
        notes.append(f"testing.failpoints {', '.join(unknown)} are left out")
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
    size = ModelSize(parameters=fit.parameter_bytes // FLOAT32_BYTES, samples=fit.samples.get("train"))
    if sizes.sample_bytes is None or sizes.slice_samples is None:
        return size
    return size.model_copy(update={"sample_bytes": sizes.sample_bytes, "slice_samples": sizes.slice_samples})


def _machine(fit: Calibration, job: Job, number: int) -> MachineGroup:
    """The machine of a worker; one that the run didn't have is like one that it had."""
    worker = fit.workers[number % len(fit.workers)]
    mean_s = mean_batch_s(fit.job, job, worker, number)
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


def mean_batch_s(base: Job, job: Job, worker: WorkerFit, number: int) -> float:
    """Mean seconds of a worker's batch under a job, by those under the base job.

    Raises:
        ConfigError: SIM003, a floor of ``[testing]`` hides how long the batches would be.

    """
    slowdown, floor_s = _throttle(base.testing, worker.worker)
    new_slowdown, new_floor_s = _throttle(job.testing, number)
    if (slowdown, floor_s) == (new_slowdown, new_floor_s) and floor_s:
        return worker.mean_s
    if floor_s and (new_floor_s < floor_s or slowdown != new_slowdown):
        got = f"at least {floor_s:g} s for each batch of worker {worker.worker}"
        problem = "the run's own [testing] hides how long batches are without it"
        raise ConfigError("SIM003", problem, got, fix="take a run without it, or try longer times")
    if floor_s:
        return worker.mean_s + new_floor_s - floor_s
    size = job.rounds.max_batch_size / base.rounds.max_batch_size
    return max(worker.mean_s / slowdown * size * new_slowdown, new_floor_s)


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
    plain: list[float] = []
    after_evaluation: list[float] = []
    for times in fit.times[1:]:
        overheads = after_evaluation if times.evaluate_s else plain
        overheads.append(times.overhead_s)
    return max(0.0, median(plain or after_evaluation) - fit.typical("merge_s"))


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
    number = sum(fit.losses.values())
    if not number or kills_of(fit.job.testing.failpoints):
        return Failures()
    kinds = FailureKinds.model_validate(dict(fit.losses), strict=False)
    return Failures(every_h=fit.worker_hours / number, kinds=kinds)


def require_told(keys: Sequence[tuple[str, str]]) -> None:
    """Refuse settings whose effect on the time of a batch isn't in the records.

    Raises:
        ConfigError: SIM003.

    """
    for key, value in keys:
        path = tuple(key.replace("-", "_").split("."))
        if any(path[:length] in UNTOLD for length in (1, 2)):
            problem = f"{key} changes the time of a batch, which only a run with it can tell"
            raise ConfigError("SIM003", problem, value, fix="leave it out, and start from a run that has it")
