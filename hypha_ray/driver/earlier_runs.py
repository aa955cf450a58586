"""Earlier runs: that of a job's name, which is begun, resumed or refused; and those of the same work, with their pace.

    trainers      train batch k, s ───► train batch k + 1 ───►
    generators    respond to batch k + 1, s on one of them ───►

Trainers never wait if all generators together respond to as many batches in a second as all trainers learn from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hypha_ray.config import Job
from hypha_ray.config.entry_point import print_notes
from hypha_ray.config.keys import KeyPath
from hypha_ray.config.load import (
    CONFIG,
    Difference,
    differences,
    job_of_run,
    load,
    refuse_changes,
    resolved_toml,
    with_absolute_folders,
)
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset, described
from hypha_ray.driver.data_source import DataSource
from hypha_ray.errors import CheckpointError, HyphaError
from hypha_ray.model.sources import IDENTITY, changed_error, changes, folder_hash, identity_of, is_replaceable, pinned
from hypha_ray.scheduler.failures import EvaluationPatience
from hypha_ray.store.commits import CommitLog
from hypha_ray.store.directory import RunDirectory, runs
from hypha_ray.store.restore_point import usable_rounds
from hypha_ray.store.snapshots import newest_good
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, SUMMARY, Record, by_round, read_json, read_jsonl
from hypha_ray.telemetry.sinks.table import duration
from hypha_ray.texts import counted, rounds_text

MOST_RUNS = 20
"""Most runs, the newest first, that are compared with a job."""
MOST_BYTES = 8 << 20
"""Most bytes of a run's metrics that are read."""
_KEYS_OF_EQUAL_PACE: tuple[KeyPath, ...] = (
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
"""Keys whose values change no round's time; fewer than those that a simulation leaves out, such as the loss."""
_OF_RATES = ("learning_rate", "momentum", "weight_decay", "betas", "epsilon", "schedule", "clip_norm", "total_steps")
"""Last parts of optimizer keys whose values change a step's result, but not its time."""
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


def settle(job: Job, directory: RunDirectory, manifest: Manifest, resume: bool) -> None:
    """Begin a run, or check that an existing run is this one. The caller holds its lock.

    Args:
        job: with `run.name` and `run.dir` set.
        directory: run directory, which may not exist yet.
        manifest: of the dataset.
        resume: whether to accept changed settings, as far as possible.

    Raises:
        ConfigError: the run belongs to another job and `resume` is False, or the directory can't be written.
        CheckpointError: the run is of another training.

    """
    if directory.begun:
        compare(job, directory, manifest, resume)
    directory.write(DATASET, described(manifest))
    directory.configure(resolved_toml(job))


def with_identity(job: Job, directory: RunDirectory, source: DataSource, resume: bool) -> Job:
    """The job with the hashes of its run's first inputs, and with the commits of a hub's repositories as revisions.

    Args:
        job: with `run.name` and `run.dir` set.
        directory: run directory, which may not exist yet.
        source: the dataset, with its tokenizer.
        resume: whether to accept other external trainers, another reward model, or another source of a user's member
            of a family.

    Raises:
        CheckpointError: CKPT007, an input has another content than when the run began.
        HyphaError: a hub refuses or can't be reached.

    """
    first_hashes = known_identity(directory)
    job = pinned(job, first_hashes)
    hashes = identity_of(with_absolute_folders(job))
    preprocessor = source.manifest.preprocessor
    if preprocessor is not None and preprocessor.folder is not None:
        tokenizer_folder = source.folder / preprocessor.folder
        if tokenizer_folder.is_dir():
            hashes["dataset's tokenizer"] = folder_hash(tokenizer_folder)
    changed_files = changes(hashes, first_hashes)
    refused = [key for key in changed_files if not (resume and is_replaceable(key))]
    if refused:
        raise changed_error(refused)
    print_notes([f"{key} has changed; it is taken as it is here" for key in changed_files])
    return job.beginning_with({**first_hashes, **hashes})


def known_identity(directory: RunDirectory) -> dict[str, str]:
    """Hashes of a run's first inputs; none before it has begun, and of a run of an earlier release."""
    return read_json(directory.path / IDENTITY) if directory.begun else {}


def keep_identity(job: Job, directory: RunDirectory) -> None:
    """Write the hashes of the run's first inputs.

    Raises:
        ConfigError: the directory can't be written.

    """
    directory.write(IDENTITY, json.dumps(dict(job.begun_with), indent=1, sort_keys=True))


def compare(job: Job, directory: RunDirectory, manifest: Manifest, resume: bool) -> None:
    """Check that an existing run is this one, and print its progress; nothing is written.

    Raises:
        HyphaError: as `settle`.

    """
    first_sha256 = RunDataset.parse(read_json(directory.path / DATASET)).sha256
    same_data = None if first_sha256 is None else first_sha256 == manifest.identity
    run_job = job_of_run(directory.path)
    changed_keys = differences(job, run_job)
    if not resume:
        refuse_changes(changed_keys, directory.path)
    _require_same_training(changed_keys, directory, same_data, manifest.name)
    print_notes([f"{change}; it is taken as it is here" for change in changed_keys])
    print_notes([f"run {directory.path.name} {standing(job, directory)}"])


def is_done(job: Job, directory: RunDirectory) -> bool:
    """Whether all rounds are committed, and the last weights are undamaged, or the run has ended early."""
    rounds = committed(directory)
    if ended_early(job, directory) is not None:
        return True
    return rounds >= job.rounds.update_rounds and newest_good(directory.path) == rounds - 1


def ended_early(job: Job, directory: RunDirectory) -> str | None:
    """Reason for which the run ended before all rounds; None if it didn't, or has more patience or money now."""
    reason = read_json(directory.path / SUMMARY).get("ended_early")
    if reason is None or newest_good(directory.path) is None:
        return None
    if str(reason).startswith(f"{job.goal.budget} "):
        return str(reason)
    evaluations = by_round(read_jsonl(directory.path / METRICS, ("eval",)), "eval")
    return EvaluationPatience(job.rounds, evaluations).exhausted


def last_round(job: Job, directory: RunDirectory) -> int:
    """Round whose weights are the run's result, once it has ended."""
    if ended_early(job, directory) is not None:
        newest_round = newest_good(directory.path)
        if newest_round is not None:
            return newest_round
    return committed(directory) - 1


def committed(directory: RunDirectory) -> int:
    """Number of committed rounds."""
    return max(CommitLog(directory.path).rounds(), default=-1) + 1


def standing(job: Job, directory: RunDirectory) -> str:
    """Progress of a run, in words; rounds are counted from one, as on the console."""
    rounds = committed(directory)
    total = job.rounds.update_rounds
    reason = ended_early(job, directory)
    if reason is not None:
        return f"ended early: {reason}"
    if rounds >= total:
        return f"has all of its {counted(total, 'round')}"
    if not rounds:
        return "has no commit yet, and starts from the beginning"
    usable = usable_rounds(directory.path, verify=True)
    if usable == rounds:
        return f"goes on after round {rounds} of {total}"
    if usable:
        lost_text = rounds_text(range(usable, rounds))
        return f"goes on after round {usable} of {total}: there is no usable checkpoint of {lost_text}"
    return f"has {counted(rounds, 'round')} of {total}, but no usable checkpoint"


def _require_same_training(
    changed_keys: Sequence[Difference], directory: RunDirectory, same_data: bool | None, dataset: str
) -> None:
    """Refuse changes that can't be resumed from the run's commits; the same data may have moved."""
    fix = f"choose another run.name to train anew, or give what {directory.config} has"
    for change in changed_keys:
        if change.forks and not (change.of_data and same_data):
            raise CheckpointError("CKPT004", f"run {directory.path.name} is another training: {change}", fix=fix)
    if same_data is False:
        problem = f"run {directory.path.name} is another training: dataset {dataset!r} has other samples now"
        raise CheckpointError("CKPT004", problem, fix="choose another run.name, or restore the dataset")


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


def runs_of_same_work(job: Job, manifest: Manifest, ignored_paths: Sequence[KeyPath] = ()) -> Iterator[Path]:
    """Yield folders of other runs that did the same work, newest first; what is in `ignored_paths` may differ."""
    for folder in _newest_runs(runs(job.run.dir)):
        if folder.name == job.run.name:
            continue
        if RunDataset.parse(read_json(folder / DATASET)).sha256 != manifest.identity:
            continue
        if _has_same_work(job, folder, ignored_paths):
            yield folder


def pace_of_run(folder: Path, workers: int) -> Pace | None:
    """Return the pace of a run's rounds with that many workers, without the first; None if it has too few."""
    gaps: list[float] = []
    records = read_jsonl(folder / METRICS, ("round",), end=MOST_BYTES)
    for earlier_round, later_round in pairwise(by_round(records, "round")):
        gap_s = _gap_s(earlier_round, later_round)
        if gap_s is not None and later_round.get("workers") == workers:
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


def _gap_s(earlier_round: Record, later_round: Record) -> float | None:
    """Seconds between the ends of two rounds; None if they don't follow each other in one attempt."""
    begin_s = earlier_round.get("elapsed_s")
    end_s = later_round.get("elapsed_s")
    if later_round["round"] != earlier_round["round"] + 1 or begin_s is None or end_s is None or end_s <= begin_s:
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


def _has_same_work(job: Job, folder: Path, ignored_paths: Sequence[KeyPath]) -> bool:
    """Whether a run's rounds are as long as the job's, as far as settings say."""
    try:
        config = str(folder / CONFIG)
        run_job = load(["@", config]).job
    except (HyphaError, OSError):  # The file is of another release, or damaged.
        return False
    if run_job.goal.is_set:  # Such a run had as many workers as it needed.
        return False
    return all(_changes_no_pace(difference.path, ignored_paths) for difference in differences(job, run_job))


def _changes_no_pace(path: KeyPath, ignored_paths: Sequence[KeyPath]) -> bool:
    if any(path[: len(key)] == key for key in (*_KEYS_OF_EQUAL_PACE, *ignored_paths)):
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
    needed_text = counted(generators_needed(trainers, times.generation_s, times.training_s), noun)
    text = f"{needed_text} responding would keep {counted(trainers, 'trainer')} busy: {times.generation_s:.3g} s of "
    text += f"responding and {times.training_s:.3g} s of training a batch, "
    text += f"the medians of {counted(times.rounds, 'round')} of run {times.run}"
    if times.devices:
        text += f" on {', '.join(times.devices)}"
    yield "responses", text


def time_facts(job: Job, pace: Pace | None, price: float | None, done: int = 0) -> Iterator[tuple[str, str]]:
    """Facts about time and cost, or how to measure them.

    Args:
        job: the job file.
        pace: measured pace of the same work; None: there is none.
        price: price of all machines per hour; None: they have none.
        done: number of committed rounds.

    """
    if pace is None or job.rounds.max_exchange_share is not None:
        text = "not measured yet: --rounds.update_rounds 2 shows the pace"
        if job.rounds.max_exchange_share is not None:
            text = "unknown, as rounds grow by the time of their exchanges"
        yield "time", text
        if price is not None:
            yield "cost", f"{price:.2f} an hour"
        yield from goal_facts(job)
        return
    rounds = max(0, job.rounds.update_rounds - done)
    time_s = rounds * pace.round_s
    rest_text = ""
    if done:
        rest_text = " for the rest"
    pace_text = f"{duration(pace.round_s)} a round, the median of {counted(pace.rounds, 'round')} of run {pace.run}"
    if pace.devices:
        pace_text += f" on {', '.join(pace.devices)}"
    yield "time", f"about {duration(time_s)}{rest_text}: {pace_text}"
    if price is not None:
        cost = price * time_s / 3600
        yield "cost", f"about {cost:.2f}{rest_text}, at {price:.2f} an hour"
    yield from goal_facts(job, time_s)


def goal_facts(job: Job, time_s: float | None = None) -> Iterator[tuple[str, str]]:
    """Deadline and budget; the deadline beside the time on all machines, in seconds, if that is known."""
    parts = []
    by_s = job.goal.by_s
    if by_s is not None:
        text = f"done {job.goal.by} after the first start"
        if time_s is not None and time_s > by_s:
            text += f", which is {duration(time_s - by_s)} too early for that pace"
        parts.append(text)
    if job.goal.at_most is not None:
        parts.append(f"at most {job.goal.at_most:g} for all leases")
    if parts:
        yield "goal", "; ".join(parts)
