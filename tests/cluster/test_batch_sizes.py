"""Workers with leases of unlike memory: each trains on the largest batches that fit, as one process would."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import events
from tests.support.jobs import MODEL, Outcome, job_of, run_job
from tests.support.plain import final_weights, furthest, joined_batches, train_plainly

MOST = 16
WIDE = MODEL | {"vocab_size": 60_000, "hidden_size": 8, "num_hidden_layers": 1}
"""A model whose logits make a step's memory grow by some 20 MB with each sample."""
LEASES = [{"memory_gb": 6.0}, {"memory_gb": 0.85}]
SGD = {"name": "sgd", "learning_rate": 0.02, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1e9}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Folder in which the workers of a local Ray keep sizes."""
    home, before = tmp_path_factory.mktemp("home"), os.environ.get("HYPHA_RAY_HOME")
    os.environ["HYPHA_RAY_HOME"] = str(home)
    request.getfixturevalue("local_ray")
    yield home / "batch_sizes"
    if before is None:
        del os.environ["HYPHA_RAY_HOME"]
    else:
        os.environ["HYPHA_RAY_HOME"] = before


def run_of(name: str, corpus: Path, folder: Path, **tables: dict[str, Any]) -> tuple[Outcome, float]:
    """A run of workers that try sizes; its greatest difference from plain training on the same samples."""
    rounds = {"update_rounds": 4, "max_batch_size": MOST, "evaluate_every": 0} | tables.pop("rounds")
    job = job_of(
        name,
        corpus,
        LEASES,
        model={"config": WIDE},
        rounds=rounds,
        inner_optimizer=SGD,
        worker={"probe_batch_size": True, "prefetch_mb": 1},
        resources={"start_deadline_s": 600.0},
        **tables,
    )
    run = run_job(job, folder, corpus)
    found = final_weights(run.directory)
    assert furthest(found, train_plainly(job, [])) > 1e-4, "nothing was learned"
    return run, furthest(found, train_plainly(job, joined_batches(run, corpus)))


@pytest.mark.long
def test_unequal_batches_train_as_one_process_with_a_barrier_and_in_steps(
    kept: Path, corpus: Path, tmp_path: Path
) -> None:
    tables = {"samples_between_updates": 40}
    run, difference = run_of("steps", corpus, tmp_path, rounds=tables, sync={"strategy": "sync"})
    sizes = {event["worker"]: event["batch_size"] for event in events(run, "join")}
    assert sizes[0] == MOST and 1 <= sizes[1] < MOST
    assert all(record["samples"] >= 40 for record in run.of_kind("round"))
    assert set(run.used().values()) == {1}
    assert difference < 1e-6
    files = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
    rounds = {"samples_between_updates": MOST + 1}
    outer = {"learning_rate": 1.0, "momentum": 0.0}
    run, difference = run_of(
        "rounds", corpus, tmp_path, rounds=rounds, sync={"dynamic_local_steps": False}, outer_optimizer=outer
    )
    assert {event["worker"]: event["batch_size"] for event in events(run, "join")} == sizes
    assert all(record["batches"] == {0: 1, 1: 1} for record in run.of_kind("round"))
    assert all(record["samples"] == MOST + sizes[1] for record in run.of_kind("round"))
    assert difference < 1e-6
    assert files == {file: file.stat().st_mtime_ns for file in kept.iterdir()}, "sizes were tried again"
