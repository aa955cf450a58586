"""Runs of the same work, the pace of their rounds, and the generators that keep a job's trainers busy at such a pace.

    trainers      train batch k, s ───► train batch k + 1 ───►
    generators    respond to batch k + 1, s on one of them ───►

Trainers never wait if all generators together respond to as many batches in a second as all trainers learn from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hypha_ray.config import Job
from hypha_ray.config.keys import KeyPath
from hypha_ray.config.load import CONFIG, differences, load
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset
from hypha_ray.errors import HyphaError
from hypha_ray.store.directory import runs
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, Record, by_round, read_json, read_jsonl
from hypha_ray.texts import counted

MOST_RUNS = 20
"""Most runs, the newest first, that are compared with a job."""
MOST_BYTES = 8 << 20
"""Most bytes of a run's metrics that are read."""
_OF_NO_PACE: tuple[KeyPath, ...] = (
    ("run", "seed"),
    ("rounds", "update_rounds"),
    ("rounds", "epochs"),
    ("rounds", "patience"),
    ("rounds", "min_delta"),
    ("dataset", "path"),
    ("dataset", "name"),
    ("checkpoint", "keep"),
    ("checkpoint", "push"),
    ("checkpoint", "export_dtype"),
    ("telemetry",),
    ("resources", "worker_price"),
    ("resources", "parameter_server_price"),
    ("resources", "min_workers"),
    ("goal",),
)
"""Keys whose values change no round's time."""
_OF_RATES = ("learning_rate", "momentum", "weight_decay", "betas", "epsilon", "schedule", "clip_norm", "total_steps")
"""Last keys of settings of optimizers that are numbers of a step, whatever they are."""
_OF_RESPONDERS: tuple[KeyPath, ...] = (
    ("rl", "model_workers"),
    ("rl", "generators"),
    ("resources", "generator"),
    ("rl", "staleness"),
    ("rl", "evaluation"),
    ("rl", "shown_responses"),
    ("resources", "num_workers"),
)
"""Keys whose values don't change the work of responding to a batch, or of training on it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Time of a round, as a run has measured it."""

    run: str
    """Name of the run."""
    round_s: float
    """Median time from one commit to the next, with evaluations, in seconds."""
    rounds: int
    """Number of rounds behind it."""
    devices: tuple[str, ...]
    """Devices of the run's workers, each kind once; empty if they aren't known."""


def pace_of_earlier_run(job: Job, manifest: Manifest) -> Pace | None:
    """Return the pace of the newest run that did the same work with as many workers; None if there is none.

    Args:
        job: the job file.
        manifest: its dataset.

    """
    for folder in runs_of_same_work(job, manifest):
        pace = pace_of_run(folder, job.num_workers)
        if pace is not None:
            return pace
    return None


def runs_of_same_work(job: Job, manifest: Manifest, but: Sequence[KeyPath] = ()) -> Iterator[Path]:
    """Yield folders of other runs that did the same work, the newest first; keys and tables `but` may differ."""
    for folder in _newest_runs(runs(job.run.dir)):
        if folder.name == job.run.name:
            continue
        if RunDataset.parse(read_json(folder / DATASET)).sha256 != manifest.identity:
            continue
        if _has_same_work(job, folder, but):
            yield folder


def pace_of_run(folder: Path, workers: int) -> Pace | None:
    """Return the pace of a run's rounds with that many workers, without the first; None if it has too few."""
    gaps: list[float] = []
    records = read_jsonl(folder / METRICS, ("round",), end=MOST_BYTES)
    for before, after in pairwise(by_round(records, "round")):
        gap_s = _gap_s(before, after)
        if gap_s is not None and after.get("workers") == workers:
            gaps.append(gap_s)
    if not gaps:
        return None
    return Pace(folder.name, median(gaps), len(gaps), devices_of_run(folder))


def devices_of_run(folder: Path) -> tuple[str, ...]:
    """Devices of the workers that have joined a run."""
    devices: set[str] = set()
    for event in read_jsonl(folder / EVENTS, ("join",), end=MOST_BYTES):
        if event.get("device") is not None:
            devices.add(str(event["device"]))
    return tuple(sorted(devices))


def _gap_s(before: Record, after: Record) -> float | None:
    """Seconds between the ends of two rounds; None if they don't follow each other in one attempt."""
    begin_s = before.get("elapsed_s")
    end_s = after.get("elapsed_s")
    if after["round"] != before["round"] + 1 or begin_s is None or end_s is None or end_s <= begin_s:
        return None
    return float(end_s - begin_s)


def _newest_runs(folder: Path) -> list[Path]:
    """Folders of runs, the newest first."""
    dated: list[tuple[float, Path]] = []
    with suppress(OSError):
        for config in folder.glob(f"*/{CONFIG}"):
            dated.append((config.stat().st_mtime, config.parent))
    dated.sort(reverse=True)
    return [run for _, run in dated[:MOST_RUNS]]


def _has_same_work(job: Job, folder: Path, but: Sequence[KeyPath]) -> bool:
    """Whether a run's rounds are as long as the job's, as far as settings say."""
    try:
        config = str(folder / CONFIG)
        run_job = load(["@", config]).job
    except (HyphaError, OSError):  # Of another release, or damaged.
        return False
    if run_job.goal.is_set:  # Its workers were as many as it needed.
        return False
    return all(_changes_no_pace(difference.path, but) for difference in differences(job, run_job))


def _changes_no_pace(path: KeyPath, but: Sequence[KeyPath]) -> bool:
    if any(path[: len(key)] == key for key in (*_OF_NO_PACE, *but)):
        return True
    return path[0] in ("inner_optimizer", "outer_optimizer") and path[-1] in _OF_RATES


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Times of a batch of prompts, as a run has measured them."""

    run: str
    """Name of the run."""
    generation_s: float
    """Median over rounds of the seconds of one process for the responses to a batch, with their rewards."""
    training_s: float
    """Median over rounds of the seconds of a trainer for the rest."""
    rounds: int
    """Number of rounds behind them."""
    devices: tuple[str, ...]
    """Devices of the run's workers, each kind once; empty if they aren't known."""


def generators_needed(trainers: int, generation_s: float, training_s: float) -> int:
    """Return the least number of generators that respond to batches as fast as all trainers learn from them.

    Args:
        trainers: number of trainers.
        generation_s: seconds of one generator for the responses to a batch.
        training_s: seconds of a trainer for a batch, above 0.

    """
    return max(1, math.ceil(trainers * generation_s / training_s))


def times_of_earlier_run(job: Job, manifest: Manifest) -> BatchTimes | None:
    """Return the times of a batch in the newest run that has measured them for the same work; None without one."""
    for folder in runs_of_same_work(job, manifest, _OF_RESPONDERS):
        times = times_of_run(folder)
        if times is not None:
            return times
    return None


def times_of_run(folder: Path) -> BatchTimes | None:
    """Return the times of a batch in a run's rounds, without the first; None if it has none."""
    generation_s: list[float] = []
    training_s: list[float] = []
    records = by_round(read_jsonl(folder / METRICS, ("round",), end=MOST_BYTES), "round")
    for record in records[1:]:  # The first one has loaded libraries.
        if record.get("generation_s") and record.get("training_s"):
            generation_s.append(float(record["generation_s"]))
            training_s.append(float(record["training_s"]))
    if not training_s:
        return None
    rounds = len(training_s)
    return BatchTimes(folder.name, median(generation_s), median(training_s), rounds, devices_of_run(folder))


def generator_facts(job: Job, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Fact about the number of processes that keep a job's trainers busy; none if nothing was measured."""
    if job.rl.algorithm is None:
        return
    times = times_of_earlier_run(job, manifest)
    if times is None:
        return
    trainers = job.num_workers
    noun = "generator" if job.rl.generators else "model worker"
    needed = counted(generators_needed(trainers, times.generation_s, times.training_s), noun)
    text = f"{needed} responding would keep {counted(trainers, 'trainer')} busy: {times.generation_s:.3g} s of "
    text += f"responding and {times.training_s:.3g} s of training a batch, "
    text += f"the medians of {counted(times.rounds, 'round')} of run {times.run}"
    if times.devices:
        text += f" on {', '.join(times.devices)}"
    yield "responses", text
