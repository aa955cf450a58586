"""Whole jobs on a local Ray cluster: what comes out, and that it is right to the bit where it has to be."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util import list_named_actors

import hypha_ray
from hypha_ray.market.cluster import lease_entries
from hypha_ray.model.build import build_model
from tests.support.jobs import MODEL, job_of, run_job
from tests.support.plain import final_weights, furthest, joined_batches, train_plainly


@pytest.fixture(scope="module")
def results(local_ray: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("runs")


def test_job_on_two_workers_trains_commits_and_exports(results: Path, corpus: Path) -> None:
    sizes = {"update_rounds": 4, "samples_between_updates": 256}
    job = job_of("two-workers", corpus, rounds=sizes, telemetry={"plots": True})
    run = run_job(job, results, corpus, export=True)
    rounds, evals = run.of_kind("round"), run.of_kind("eval")
    assert [record["round"] for record in rounds] == [0, 1, 2, 3] == [record["round"] for record in evals]
    assert max(record["val_loss"] for record in evals) < 4.5 < math.log(MODEL["vocab_size"])
    assert all(set(record["batches"]) == {0, 1} for record in rounds)
    assert [commit["parent_sha256"] for commit in run.commits()[1:]] == [
        commit["theta_sha256"] for commit in run.commits()[:-1]
    ]
    used = run.used()
    assert set(used.values()) == {1} and len(used) == rounds[-1]["samples_total"] >= 1024
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "model")
    prompt = tokenizer("import ", return_tensors="pt", add_special_tokens=False)
    text = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert text.shape[1] == prompt["input_ids"].shape[1] + 8
    for name in ("config.toml", "metrics.jsonl", "events.jsonl", "summary.json", "plots/loss.png"):
        assert (run.directory / name).stat().st_size > 0


def test_run_leaves_no_actor_and_no_lease_behind(results: Path, corpus: Path) -> None:
    run_job(job_of("tidy", corpus, rounds={"update_rounds": 1}), results, corpus)
    deadline = time.monotonic() + 30  # Ray ends actors and leases in its own time.
    while left := _left_of("tidy"):
        assert time.monotonic() < deadline, left
        threading.Event().wait(0.1)


def _left_of(run: str) -> list[str]:
    """Names of a run's actors and leases that are still there."""
    actors = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == run]
    groups = [group for group in ray.util.placement_group_table().values() if group["name"].startswith(f"{run}/")]
    return actors + [group["name"] for group in groups if group["state"] != "REMOVED"]


def test_one_worker_with_plain_averaging_is_plain_training_bit_for_bit(results: Path, corpus: Path) -> None:
    job = job_of(
        "plain",
        corpus,
        rounds={"update_rounds": 3, "samples_between_updates": 32, "evaluate_every": 1},
        inner_optimizer={"schedule": "cosine-with-warmup", "warmup_steps": 3},
        outer_optimizer={"learning_rate": 1.0, "momentum": 0.0},
        resources={"num_workers": 1},
    )
    run = run_job(job, results, corpus)
    ids = np.concatenate([batch["input_ids"] for batch in joined_batches(run, corpus)])
    expected = train_plainly(job, [{"input_ids": batch} for batch in ids.reshape(-1, 4, ids.shape[1])])
    found = final_weights(run.directory)
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in found)


def test_one_step_rounds_of_sgd_are_data_parallelism(results: Path, corpus: Path) -> None:
    job = job_of(
        "data-parallel",
        corpus,
        rounds={"update_rounds": 6, "samples_between_updates": 8, "evaluate_every": 0},
        inner_optimizer={"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.0, "clip_norm": 1e9},
        outer_optimizer={"learning_rate": 1.0, "momentum": 0.0},
        testing={"batch_s": 0.2},  # Neither worker has time for both batches.
    )
    run = run_job(job, results, corpus)
    assert all(record["batches"] == {0: 1, 1: 1} for record in run.of_kind("round"))
    expected, found = train_plainly(job, joined_batches(run, corpus)), final_weights(run.directory)
    assert furthest(found, expected) < 1e-6
    start = build_model(job.model, 0)
    moved = max(np.abs(found[name] - p.detach().numpy()).max() for name, p in start.named_parameters())
    assert moved > 1e-3, "nothing was learned"


@pytest.mark.long
def test_workers_of_unequal_speed_wait_little_after_the_second_round(results: Path, corpus: Path) -> None:
    job = job_of(
        "unequal",
        corpus,
        rounds={"update_rounds": 5, "samples_between_updates": 700, "evaluate_every": 0},
        resources={"num_workers": 3, "worker": {"cpu": 0.5}},
        testing={"batch_times_s": [0.05, 0.1, 0.2]},
    )
    run = run_job(job, results, corpus)
    later = run.of_kind("round")[2:]
    assert np.median([record["idle_fraction"] for record in later]) <= 0.1
    batches = [sum(record["batches"][worker] for record in later) for worker in range(3)]
    assert batches[0] > 1.5 * batches[1] > 2 * batches[2]


class Told(hypha_ray.Callback):
    """Keeps rounds and kinds of events, and stops the run after its second round, once."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.events: set[str] = set()

    def on_round(self, record: dict[str, Any]) -> None:
        self.rounds.append(record["round"])
        if self.rounds == [0, 1]:
            raise hypha_ray.StopTraining

    def on_event(self, record: dict[str, Any]) -> None:
        self.events.add(record["kind"])


@pytest.mark.long
def test_training_in_the_background_is_stopped_by_a_callback_and_goes_on_from_its_commit(
    results: Path, corpus: Path
) -> None:
    rounds = {"update_rounds": 30}
    job = job_of("background", corpus, run={"dir": str(results)}, rounds=rounds, testing={"slowdown": [20.0, 20.0]})
    told = Told()
    handles: list[hypha_ray.Training] = []
    starter = threading.Thread(target=lambda: handles.append(hypha_ray.train(job, callbacks=[told], wait=False)))
    starter.start()  # Signals reach the main thread alone, and no part of a run may need it.
    starter.join()
    (training,) = handles
    with pytest.raises(TimeoutError, match="it trains on"):
        training.result(0.01)
    run = training.result(120)
    assert training.progress.state == "stopped" and 2 <= run.committed_rounds < 30
    assert {"join", "plan", "commit"} <= told.events
    assert lease_entries("background") == [], "this process stays connected, and other runs need the room"

    job = job.model_copy(update={"rounds": job.rounds.model_copy(update={"update_rounds": run.committed_rounds + 2})})
    run = hypha_ray.train(job, resume=True, callbacks=[told])
    assert list(run.frame("round").index) == list(range(run.committed_rounds))
    assert told.rounds[-1] == run.committed_rounds - 1 and run.model.is_dir()
    assert run.evaluate(corpus)["val_loss"] == pytest.approx(run.frame("eval")["val_loss"].iloc[-1], rel=1e-5)
    texts = {run.generate("import ", max_new_tokens=4, seed=3) for _ in range(2)}
    assert len(texts) == 1
    assert sum(tensor.numel() for tensor in run.load_model().parameters()) > 10_000
