"""Number of generators that keep the trainers of a job busy, by the times that an earlier run has measured.

    trainers      train batch k, s ───► train batch k + 1 ───►
    generators    respond to batch k + 1, s on one of them ───►

Trainers never wait if all generators together respond to as many batches in a second as all trainers learn from.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hypha_ray.config import Job
from hypha_ray.config.keys import KeyPath
from hypha_ray.data.manifest import Manifest
from hypha_ray.driver.summary.earlier_runs import MOST_BYTES, devices_of_run, runs_of_same_work
from hypha_ray.telemetry.sinks.files import METRICS, by_round, read_jsonl
from hypha_ray.texts import counted

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
