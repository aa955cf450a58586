"""Runs of the same work, and the pace of their rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from hypha_ray.config import Job
from hypha_ray.config.compare import differences
from hypha_ray.config.keys import KeyPath
from hypha_ray.config.load import CONFIG, load
from hypha_ray.data.manifest import Manifest
from hypha_ray.data.mixture import DATASET, RunDataset
from hypha_ray.errors import HyphaError
from hypha_ray.store.directory import runs
from hypha_ray.telemetry.sinks.files import EVENTS, METRICS, Record, by_round, read_json, read_jsonl

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
