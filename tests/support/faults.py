"""What tests of faults share: jobs with failpoints, and what the run directory says about them afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hypha_ray.config import Job
from hypha_ray.failpoints import hits
from hypha_ray.telemetry.sinks.files import read_jsonl
from tests.support.jobs import Outcome, job_of, run_job


def faulty(name: str, corpus: Path, specs: list[str], log: Path, **tables: dict[str, Any]) -> Job:
    """A small job on two workers with failpoints armed; tables given here are laid over it."""
    testing = {"failpoints": specs, "failpoint_log": str(log), **tables.pop("testing", {})}
    base: dict[str, dict[str, Any]] = {
        "rounds": {"update_rounds": 4, "samples_between_updates": 64, "max_batch_size": 4},
        "worker": {"lease_s": 3.0},
    }
    for table, values in tables.items():
        base[table] = {**base.get(table, {}), **values}
    return job_of(name, corpus, testing=testing, **base)


def survive(
    name: str,
    corpus: Path,
    folder: Path,
    specs: list[str],
    fired: int,
    until: Callable[[], bool] = bool,
    **tables: dict[str, Any],
) -> Outcome:
    """Run a job whose failpoints fire `fired` times in all; every commit is there, and every sample in it once.

    A job with a condition `until` is ended once that is true, and has any number of commits.
    """
    log = folder / "hits.jsonl"
    job = faulty(name, corpus, specs, log, **tables)
    run = run_job(job, folder, corpus, until=until)
    names = {spec.partition("=")[0].partition(":")[0] for spec in specs}
    assert sum(hits(log, point) for point in names) == fired
    rounds = [commit["round"] for commit in run.commits()]
    assert rounds == list(range(job.rounds.update_rounds if until is bool else len(rounds)))
    assert set(run.used().values()) == {1}
    return run


def is_back(directory: Path, worker: int, goings: int) -> bool:
    """Whether a worker that went so often, for whatever reason, has come back and has a delta in a commit since."""
    joins = [event for event in read_jsonl(directory / "events.jsonl", ["join"]) if event["worker"] == worker]
    deltas = [delta for commit in Outcome(directory, []).commits() for delta in commit["deltas"]]
    return len(joins) > goings and joins[-1]["incarnation"] in {delta["incarnation"] for delta in deltas}


def events(run: Outcome, kind: str) -> list[dict[str, Any]]:
    """What the run directory says happened."""
    lines = (run.directory / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def news(run: Outcome) -> list[str]:
    """What the driver was told of the fleet, line by line."""
    return [record["text"] for record in run.of_kind("news")]


def told_of_replacements(run: Outcome, role: str) -> bool:
    """Whether the driver was told that an actor was replaced, and why: each time, or several times at once."""
    return any(re.match(rf"{role} was replaced(?: \d+ times, the first)?: ", text) for text in news(run))


def audit_fleet_time(run: Outcome, workers: int) -> dict[str, float]:
    """Hold the use of a run's time against its events and commits; return the seconds of each use.

    All time from each worker's first machine to the end is accounted for, once.
    """
    (end,) = events(run, "fleet_time")
    rounds = run.of_kind("round")
    seconds = dict.fromkeys(end["time_shares"], 0.0)
    for record in [*rounds, end]:
        assert sum(record["time_shares"].values()) == pytest.approx(1.0)
        for kind, share in record["time_shares"].items():
            seconds[kind] += share * record["fleet_s"]
    leased_at = {event["worker"]: event["monotonic_s"] for event in reversed(events(run, "lease"))}
    assert len(leased_at) == workers
    lived_s = sum(end["monotonic_s"] - at for at in leased_at.values())
    assert sum(seconds.values()) == pytest.approx(lived_s, abs=0.5 * workers)
    summary = json.loads((run.directory / "summary.json").read_text(encoding="utf-8"))
    for kind, used_s in seconds.items():
        assert summary["time_shares"][kind] == pytest.approx(used_s / sum(seconds.values()))
    committed = sum(delta["samples"] for commit in run.commits() for delta in commit["deltas"])
    possible = sum(record["possible_samples"] for record in [*rounds, end])
    assert summary["goodput"] == pytest.approx(committed / possible)
    assert 0 < summary["goodput"] < 1
    return seconds
