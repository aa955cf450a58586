"""Synchronous jobs on a local Ray cluster: the same as one process on the joined batches, whoever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import events, is_back, survive
from tests.support.jobs import job_of, run_job
from tests.support.plain import final_weights, furthest, joined_batches, train_plainly

pytestmark = pytest.mark.usefixtures("local_ray")

SGD = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": 1.0}
KILLS = {
    "worker.step:1": "2",
    "worker.before_delta:1": "4",
    "worker.mid_delta:1": "5",
    "worker.after_delta:1": "6",
    "worker.start:1": "5",
}
"""Five points between batch and gradient, and after it; a worker that has just come back dies once more."""


def test_steps_are_those_of_one_process_on_the_joined_batch(corpus: Path, tmp_path: Path) -> None:
    rounds = {"update_rounds": 8, "samples_between_updates": 20, "max_batch_size": 8, "evaluate_every": 4}
    job = job_of("sync", corpus, sync={"strategy": "sync"}, rounds=rounds, inner_optimizer=SGD)
    run = run_job(job, tmp_path, corpus)
    assert all(record["batches"] == {0: 2, 1: 2} and record["samples"] == 20 for record in run.of_kind("round"))
    found, start = final_weights(run.directory), train_plainly(job, [])
    assert furthest(found, train_plainly(job, joined_batches(run, corpus))) < 1e-6
    assert furthest(found, start) > 1e-3, "nothing was learned"


def test_worker_killed_at_five_points_costs_no_batch_and_no_step(corpus: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "sync": {"strategy": "sync"},
        "rounds": {"update_rounds": 120, "samples_between_updates": 8, "max_batch_size": 4, "evaluate_every": 0},
        "inner_optimizer": {**SGD, "momentum": 0.0, "learning_rate": 0.02},
        "checkpoint": {"every_rounds": 20},
        "testing": {"batch_s": 0.25},
    }
    specs = [f"{point}=kill@{hit}" for point, hit in KILLS.items()]

    def back() -> bool:
        return is_back(tmp_path / "sync-kills", 1, len(specs))

    run = survive("sync-kills", corpus, tmp_path, specs, len(specs), back, **tables)
    assert [event["worker"] for event in events(run, "loss")] == [1] * len(specs)
    assert len(run.commits()[-1]["deltas"]) == 2, "it isn't back at the end"
    job = job_of("sync-kills", corpus, **tables)
    assert furthest(final_weights(run.directory), train_plainly(job, joined_batches(run, corpus))) < 1e-6
