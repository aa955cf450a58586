"""Parameters of a simulation, fitted to the records of a finished or running run.

    plan r ──merge──► evaluate ──► batches ──hand over──► last delta ──reduce──► plan r + 1 ──write──► commit of r

A worker's batch times come from its reports. The rest of a round is told apart by the records of rounds, and the times
of plans and commits. The first round is left out wherever there are others: caches are cold in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from pathlib import Path
from statistics import median, pvariance
from typing import Any

import numpy as np

from hypha_ray.config import Job
from hypha_ray.config.load import CONFIG, PROVENANCE, load
from hypha_ray.errors import CheckpointError, ConfigError
from hypha_ray.store.restore_point import newest_layout
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, Record, by_round, read_json, read_jsonl

FEWEST_ROUNDS = 2
"""Fewest complete rounds that a simulation can be fitted to."""
DRIFT_LIMIT = 0.9
"""Largest part by which a machine's speed is taken to swing."""


@dataclass(frozen=True, slots=True)
class WorkerFit:
    """Speed of one worker."""

    worker: int
    reports: int
    """Number of reports with a batch time."""
    batch_s: float
    """Median seconds of a batch."""
    mean_s: float
    """Mean seconds of a batch."""
    jitter: float
    """Differences between batches: standard deviation of the logarithm."""
    drift: float
    """Part by which the speed swings from round to round."""
    price: float | None
    """Price of its lease per hour; None without terms of an owner."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round besides its batches."""

    evaluate_s: float
    """Time of the slowest worker for its validation samples; 0 without an evaluation."""
    overhead_s: float
    """Time of the last worker from its plan to its delta, without batches and evaluation: merge, hand-over, messages.

    It is less than 0 if the worker with the slowest batches had the shortest evaluation.
    """
    merge_s: float | None
    """Part of the overhead until the last worker has merged; None if batches overlap it."""
    reduce_s: float | None
    """Time from the last delta to the next plan; None if it isn't in the records."""
    commit_s: float | None
    """Time from the next plan to the commit; None if it isn't in the records."""


@dataclass(frozen=True, slots=True)
class ActualRound:
    """Figures of a round that took place. Times in seconds, sizes in bytes."""

    number: int
    time_s: float
    bytes_up: int
    bytes_down: int
    idle_fraction: float
    samples: int
    deltas: int
    """Number of workers whose deltas it has."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A run as its records show it."""

    name: str
    job: Job
    workers: tuple[WorkerFit, ...]
    rounds: tuple[ActualRound, ...]
    times: tuple[RoundTimes, ...]
    """Times of the rounds, in the same order."""
    starts_s: tuple[float, ...]
    """Seconds from the search for a machine to a worker that is ready, one for each start."""
    losses: Mapping[str, int]
    """Number of lost workers, by kind: kill, hang or preempt."""
    worker_hours: float
    """Hours of all workers together."""
    seconds: float
    """Time of training, to the last record of a round."""
    time_s: float
    """Time from the start of each attempt to its last commit, summed."""
    cost: float | None
    """Price of all leases; None without terms of owners."""
    parameter_bytes: int
    """Bytes of the trained parameters, unencoded."""
    samples: Mapping[str, int]
    """Number of samples of the dataset, by split; empty if it isn't in the records."""

    def typical(self, part: str) -> float:
        """Median of a field of `RoundTimes` over the rounds that have it, without the first; 0 if none has it."""
        seconds = [getattr(times, part) for times in self.times[1:]]
        values = [value for value in seconds if value is not None]
        return max(0.0, median(values)) if values else 0.0


def calibrate(folder: Path) -> Calibration:
    """Fit to a run directory.

    Raises:
        CheckpointError: CKPT001, there is no run in the folder; SIM001, it is too short.
        ConfigError: SIM002, its strategy has no rounds that the records tell apart.

    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError("CKPT001", f"{folder} has no {CONFIG}", fix="give the name or folder of a run")
    job = load([f"@{folder / CONFIG}"]).job
    _require_known(job)
    records = read_jsonl(folder / METRICS)
    events = read_jsonl(folder / EVENTS)
    rounds = by_round(records, "round")
    if len(rounds) < FEWEST_ROUNDS:
        problem = f"run {folder.name} is too short to simulate"
        fix = "let it go on, or take a longer run"
        raise CheckpointError("SIM001", problem, f"{len(rounds)} complete rounds", f"{FEWEST_ROUNDS} or more", fix)
    batches = BatchRecords(job, records)
    workers = batches.fits(_prices(events))
    if not workers:
        raise CheckpointError("SIM001", f"run {folder.name} has no times of batches", fix="take another run")
    return Calibration(
        name=job.run.name or folder.name,
        job=job,
        workers=workers,
        rounds=tuple(map(_actual, rounds)),
        times=_round_times(rounds, by_round(records, "eval"), events, batches),
        starts_s=_starts(events),
        losses=_losses(events),
        worker_hours=_worker_hours(rounds),
        seconds=rounds[-1]["elapsed_s"],
        time_s=_time_s(events),
        cost=_cost(events),
        parameter_bytes=_parameter_bytes(folder, job, rounds),
        samples=_samples(folder),
    )


def _require_known(job: Job) -> None:
    if not job.sync.traits.has_barrier:
        got = f"sync.strategy = {job.sync.strategy!r}"
        fix = "take a run with a barrier, and --try sync.strategy=async"
        raise ConfigError("SIM002", "a run without a barrier doesn't tell the parts of its rounds", got, fix=fix)
    if job.rl.algorithm is not None:
        got = f"rl.algorithm = {job.rl.algorithm!r}"
        raise ConfigError("SIM002", "reinforcement learning can't be simulated", got, fix="take a run without it")


@dataclass(slots=True)
class BatchReports:
    """Batch times of reports, each with the number of batches that it is a mean of."""

    seconds: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

    def add(self, seconds: float, batches: int) -> None:
        """Add a report."""
        self.seconds.append(seconds)
        self.batches.append(batches)

    def extend(self, reports: BatchReports) -> None:
        """Add all these reports."""
        self.seconds.extend(reports.seconds)
        self.batches.extend(reports.batches)

    @property
    def mean_s(self) -> float:
        """Mean time of a batch."""
        return float(np.average(self.seconds, weights=self.batches))

    @property
    def median_s(self) -> float:
        """Median time, with each report as often as it has batches."""
        order = np.argsort(self.seconds, kind="stable")
        passed = np.cumsum(np.array(self.batches)[order])
        middle_index = int(np.searchsorted(passed, passed[-1] / 2))
        return float(self.seconds[order[middle_index]])

    @property
    def squares(self) -> float:
        """Squared deviations of logarithms from that of the mean, as if of single batches."""
        logarithms = np.log(np.array(self.seconds) / self.mean_s)
        return float(np.sum(np.array(self.batches) * logarithms**2))


class BatchRecords:
    """Batch times that workers have reported; if all of them made one batch a round, those of rounds.

    Args:
        job: the job file.
        records: lines of metrics.jsonl.

    """

    def __init__(self, job: Job, records: Sequence[Record]) -> None:
        batch_size = job.rounds.max_batch_size
        self._reports: dict[int, dict[int, BatchReports]] = defaultdict(lambda: defaultdict(BatchReports))
        """Reports by worker and round."""
        for record in records:
            if record.get("kind") == "step" and record.get("batch_s"):
                batches = max(1, -(-record["samples"] // batch_size))
                self._reports[record["worker"]][record["round"]].add(record["batch_s"], batches)
        if not self._reports:  # Workers don't time a round's first batch, and synchronous steps have no other.
            self._add_rounds(records)

    def _add_rounds(self, records: Sequence[Record]) -> None:
        for record in records:
            for worker, times in record.get("time_by_worker", {}).items():
                batches = record["batches"].get(worker)
                if batches and times.get("training"):
                    self._reports[int(worker)][record["round"]].add(times["training"] / batches, batches)

    def mean_s(self, worker: int, round: int) -> float | None:
        """Mean time of a worker's batches in a round; None without a report."""
        reports = self._reports.get(worker, {}).get(round)
        return None if reports is None else reports.mean_s

    def fits(self, prices: Mapping[int, float]) -> tuple[WorkerFit, ...]:
        """Fit each worker's speed."""
        worker_fits: list[WorkerFit] = []
        for worker, reports in sorted(self._reports.items()):
            warm_rounds = set(reports) - {0} or {0}
            of_rounds = [reports[round_number] for round_number in sorted(warm_rounds)]
            worker_fits.append(_fit(worker, of_rounds, prices.get(worker)))
        return tuple(worker_fits)


def _fit(worker: int, rounds: Sequence[BatchReports], price: float | None) -> WorkerFit:
    """Fit a worker's speed to its reports, round by round."""
    reports = BatchReports()
    for of_round in rounds:
        reports.extend(of_round)
    jitter = _jitter(rounds)
    return WorkerFit(
        worker=worker,
        reports=len(reports.seconds),
        batch_s=reports.median_s,
        mean_s=reports.mean_s,
        jitter=jitter,
        drift=_drift(rounds, jitter),
        price=price,
    )


def _jitter(rounds: Sequence[BatchReports]) -> float:
    """Standard deviation of the logarithm of one batch's time, from means of several batches within rounds."""
    squares = sum(reports.squares for reports in rounds)
    freedom = sum(len(reports.seconds) - 1 for reports in rounds)
    return sqrt(squares / freedom) if freedom > 0 else 0.0


def _drift(rounds: Sequence[BatchReports], jitter: float) -> float:
    """Amplitude of a swing with the variance between rounds that jitter leaves unexplained."""
    if len(rounds) < FEWEST_ROUNDS:
        return 0.0
    logarithms = [log(reports.mean_s) for reports in rounds]
    batches = sum(sum(reports.batches) for reports in rounds)
    unexplained = pvariance(logarithms) - jitter**2 * len(rounds) / batches
    return min(DRIFT_LIMIT, sqrt(2 * max(0.0, unexplained)))


def _actual(record: Record) -> ActualRound:
    return ActualRound(
        number=record["round"],
        time_s=record["time_s"],
        bytes_up=record["bytes_up"],
        bytes_down=record["bytes_down"],
        idle_fraction=record["idle_fraction"],
        samples=record["samples"],
        deltas=len(record["batches"]),
    )


# ── the parts of a round ──────────────────────────────────────────────────────────────────────────────────────────────


def _round_times(
    rounds: Sequence[Record], evaluations: Sequence[Record], events: Sequence[Record], batches: BatchRecords
) -> tuple[RoundTimes, ...]:
    """Tell the parts of each round apart."""
    evaluate_s = {record["round"] + 1: record["seconds"] for record in evaluations}
    planned_at = _latest(events, "plan")
    committed_at = _latest(events, "commit")
    ready_at: float | None = None
    overlapped = False
    times: list[RoundTimes] = []
    for record in rounds:
        round_number = record["round"]
        began_at = ready_at if overlapped and ready_at is not None else planned_at.get(round_number)
        overlapped = record["time_s"] == record["finish_s"]
        ready_at = None if began_at is None else began_at + record["finish_s"]
        next_plan_at = planned_at.get(round_number + 1)
        reduce_s = _difference(ready_at, next_plan_at)
        times.append(
            RoundTimes(
                evaluate_s=evaluate_s.get(round_number, 0.0),
                overhead_s=_overhead(record, evaluate_s.get(round_number, 0.0), batches),
                merge_s=None if overlapped or reduce_s is None else max(0.0, record["sync_s"] - reduce_s),
                reduce_s=reduce_s,
                commit_s=_difference(next_plan_at, committed_at.get(round_number)),
            )
        )
    return tuple(times)


def _overhead(record: Record, evaluate_s: float, batches: BatchRecords) -> float:
    """Time to the last delta without evaluation and batches; the slowest worker is taken to be the last."""
    training_s = 0.0
    for worker, count in record["batches"].items():
        batch_s = batches.mean_s(int(worker), record["round"])
        if batch_s is None:
            batch_s = record["batch_s"].get(worker, 0.0)
        training_s = max(training_s, count * batch_s)
    overhead_s: float = record["finish_s"] - evaluate_s - training_s
    return overhead_s


def _latest(events: Sequence[Record], kind: str) -> dict[int, float]:
    """Time of each round's event of a kind in the last attempt, whose clock all of them share."""
    times: dict[int, float] = {}
    for event in events:
        if event.get("kind") == "attempt":
            times.clear()
        elif event.get("kind") == kind:
            times[event["round"]] = event["monotonic_s"]
    return times


def _time_s(events: Sequence[Record]) -> float:
    """Seconds from the start of each attempt to its last commit, summed."""
    total_s = 0.0
    began_at = committed_at = 0.0
    for event in events:
        if event.get("kind") == "attempt":
            total_s += committed_at - began_at
            began_at = committed_at = event["monotonic_s"]
        elif event.get("kind") == "commit":
            committed_at = event["monotonic_s"]
    return total_s + committed_at - began_at


def _difference(earlier: float | None, later: float | None) -> float | None:
    if earlier is None or later is None or later < earlier:
        return None
    return later - earlier


# ── the fleet ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prices(events: Sequence[Record]) -> dict[int, float]:
    """Price per hour of each worker's last lease that has one."""
    leases = [event for event in events if event.get("kind") == "lease" and "price" in event]
    return {lease["worker"]: lease["price"] for lease in leases}


def _cost(events: Sequence[Record]) -> float | None:
    """Price of all leases; None if no event has one."""
    costs = [event["cost"] for event in events if event.get("kind") == "cost"]
    return sum(costs) if costs else None


def _worker_hours(rounds: Sequence[Record]) -> float:
    """Hours of all workers together."""
    seconds: float = sum(record["time_s"] * record["workers"] for record in rounds)
    return seconds / 3600


def _starts(events: Sequence[Record]) -> tuple[float, ...]:
    """Seconds from `hire` to `join` of each incarnation."""
    hired_at: dict[tuple[int, int], float] = {}
    starts: list[float] = []
    for event in events:
        source: tuple[Any, Any] = event.get("worker"), event.get("incarnation")
        if event.get("kind") == "hire":
            hired_at[source] = event["monotonic_s"]
        elif event.get("kind") == "join" and source in hired_at:
            starts.append(event["monotonic_s"] - hired_at.pop(source))
    return tuple(starts)


def _losses(events: Sequence[Record]) -> dict[str, int]:
    """Number of lost workers by the kind of failure that a simulation has for it."""
    lost_with_machine: set[int] = set()
    for event in events:
        if event.get("kind") == "machine_loss":
            lost_with_machine.update(event["workers"])
    losses: dict[str, int] = {}
    for event in events:
        match event.get("kind"):
            case "loss":
                kind = "hang" if "silent" in str(event.get("reason")) else "kill"
                if event["worker"] in lost_with_machine:
                    kind = "preempt"
            case "leaving":
                kind = "preempt"
            case _:
                continue
        losses[kind] = losses.get(kind, 0) + 1
    return losses


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parameter_bytes(folder: Path, job: Job, rounds: Sequence[Record]) -> int:
    """Bytes of the trained parameters: from the summary, a snapshot, or deltas that are sent unencoded and whole.

    Raises:
        CheckpointError: SIM001, the run has neither, and its deltas are encoded or in fragments.

    """
    summarised = read_json(folder / SUMMARY).get("parameter_bytes")
    if isinstance(summarised, int):
        return summarised
    layout = newest_layout(folder)
    if layout is not None:
        return layout.bytes()
    if job.sync.codec == "fp32" and not job.sync.staggered and rounds[0]["batches"]:
        return int(rounds[0]["bytes_up"] // len(rounds[0]["batches"]))
    problem = f"run {folder.name} has no snapshot, and its encoded deltas don't tell the model's size"
    raise CheckpointError("SIM001", problem, fix="take a run with its checkpoints or its summary.json")


def _samples(folder: Path) -> dict[str, int]:
    """Number of samples of each split of the run's dataset."""
    dataset: dict[str, Any] = read_json(folder / PROVENANCE).get("dataset") or {}
    samples = dataset.get("samples")
    return dict(samples) if isinstance(samples, dict) else {}
