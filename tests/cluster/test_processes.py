"""Workers of several processes: the rounds of one process, and whatever dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.model.build import build_model
from hypha_ray.types import Samples
from hypha_ray.worker.trainer import Trainer, trainer_of
from tests.support.descendants import processes_of
from tests.support.faults import events, survive
from tests.support.jobs import MODEL, Outcome, job_of, run_job
from tests.support.plain import final_weights, furthest
from tests.support.truth_cases import Case
from tests.support.truth_samples import BERT, LLAMA, VIT, classes, images, text

pytestmark = pytest.mark.usefixtures("local_ray")
BATCH = {"samples_between_updates": 56, "max_batch_size": 7}
"""Rounds of four batches of each worker, which no number of processes divides."""


def outcome(name: str, corpus: Path, folder: Path, processes: int, **tables: Any) -> Outcome:
    tables = {"rounds": BATCH, "worker": {"processes": processes}, "run": {"name": name, "mode": "replay"}, **tables}
    return run_job(job_of(name, corpus, **tables), folder, corpus)


def trainer(case: Case, processes: int, **tables: Any) -> Trainer:
    """A trainer without dropout, on the device that tests have."""
    model = {"type": case.task, "config": {"model_type": case.model_type, **case.config}}
    worker = {"processes": processes, "device": "cpu"}
    return trainer_of(Job.model_validate({"model": model, "worker": worker, **tables}), 0, None, processes)


def samples_of(case: Case, epoch: int = 0) -> Samples:
    size = len(next(iter(case.arrays.values())))
    return Samples(dict(case.arrays), np.stack([np.full(size, epoch), np.full(size, 3), np.arange(size)], axis=1))


def require_equal_rounds(one: Outcome, other: Outcome) -> None:
    """The same samples, figures and weights up to rounding, in commits of the same form."""
    assert other.used() == one.used() and set(one.used().values()) == {1}
    for a, b in zip(one.commits(), other.commits(), strict=True):
        assert a.keys() == b.keys()
        for left, right in zip(a["deltas"], b["deltas"], strict=True):
            assert left.keys() == right.keys() and left["samples"] == right["samples"]
            assert right["norm"] == pytest.approx(left["norm"], rel=1e-4)
    for a, b in zip(one.of_kind("round"), other.of_kind("round"), strict=True):
        exact = ("round", "samples", "tokens", "batches", "bytes_up", "bytes_down")
        assert {name: a[name] for name in exact} == {name: b[name] for name in exact}
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
    for a, b in zip(one.of_kind("eval"), other.of_kind("eval"), strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], abs=1e-5)
    assert furthest(final_weights(one.directory), final_weights(other.directory)) < 1e-5


TABLES: dict[str, dict[str, Any]] = {
    "adamw": {"rounds": BATCH | {"accumulation": 2}, "inner_optimizer": {"clip_norm": 0.5}},
    "sgd": {"inner_optimizer": {"name": "sgd", "learning_rate": 0.1}},
    "muon": {"inner_optimizer": {"name": "muon", "muon_learning_rate": 0.01}},
    "sync": {"sync": {"strategy": "sync"}},
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.long(keep=1)
def test_two_processes_train_the_rounds_of_one(name: str, corpus: Path, tmp_path: Path) -> None:
    one, other = (outcome(f"{name}-{count}", corpus, tmp_path, count, **TABLES[name]) for count in (1, 2))
    require_equal_rounds(one, other)


@pytest.mark.long
def test_four_processes_with_shards_train_the_rounds_of_one(corpus: Path, tmp_path: Path) -> None:
    tables = TABLES["adamw"] | {"resources": {"num_workers": 1}}
    one = outcome("whole", corpus, tmp_path, 1, **tables)
    four = outcome("shards", corpus, tmp_path, 4, **tables, worker={"processes": 4, "sharding": "full"})
    require_equal_rounds(one, four)


def test_adapter_and_codec_see_one_worker(corpus: Path, tmp_path: Path) -> None:
    build_model(Model(config=MODEL), seed=1).save_pretrained(tmp_path / "base")
    model = {"config": None, "repository": str(tmp_path / "base"), "lora": {"rank": 4, "dropout": 0.0}}
    tables: dict[str, Any] = {"model": model, "sync": {"codec": "bf16"}}
    one, other = (outcome(f"adapter-{count}", corpus, tmp_path, count, **tables) for count in (1, 2))
    require_equal_rounds(one, other)


def test_fragments_in_turn_are_mixed_as_with_one_process(corpus: Path, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "rounds": BATCH | {"update_rounds": 5},
        "resources": {"num_workers": 1},
        "sync": {"fragments": 2, "mixing": 0.5, "dynamic_local_steps": False},
    }
    one, other = (
        outcome(f"mixed-{count}", corpus, tmp_path, count, run={"name": f"mixed-{count}"}, **tables) for count in (1, 2)
    )
    require_equal_rounds(one, other)


PACKED = np.tile(np.concatenate([np.arange(5), np.arange(7)]), (6, 1))
"""Positions of two documents in each sample."""
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES: dict[str, Case] = {
    "masked": Case("masked-lm", "bert", BERT | CALM | {"mask_token_id": 4}, text()),
    "classes": Case("sequence-classification", "bert", BERT | CALM | {"num_labels": 3}, text(labels=classes())),
    "packed": Case("causal-lm", "llama", LLAMA, text(position_ids=PACKED)),
}


@pytest.mark.parametrize("kind", CASES)
def test_four_processes_step_and_evaluate_as_one(kind: str) -> None:
    one, four = (trainer(CASES[kind], processes) for processes in (1, 4))
    batches = [samples_of(CASES[kind], epoch).part(slice(0, size)) for epoch, size in enumerate((6, 3, 5))]
    try:
        for batch in batches:
            expected, found = one.step(batch), four.step(batch)
            assert (found.scored, found.tokens) == (expected.scored, expected.tokens)
            assert [float(found.loss), float(found.norm)] == pytest.approx(
                [float(expected.loss), float(expected.norm)], abs=1e-5
            )
        for a, b in zip(one.model.parameters(), four.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        figures = one.evaluate(batches)
        assert four.evaluate(batches) == {
            name: (pytest.approx(total, abs=1e-4), weight) for name, (total, weight) in figures.items()
        }
    finally:
        four.close()


def test_sample_without_a_finite_gradient_is_found_in_whatever_part_it_is(tmp_path: Path) -> None:
    case = Case("image-classification", "vit", VIT | CALM | {"num_labels": 3}, images(labels=classes()))
    batch = samples_of(case)
    batch.arrays["images"] = batch.arrays["images"].copy()
    batch.arrays["images"][4] = np.nan
    one, two = (trainer(case, processes, dataset={"allow_quarantine": True}) for processes in (1, 2))
    try:
        expected, found = one.step(batch), two.step(batch)
        assert found.bad.tolist() == expected.bad.tolist() == [[0, 3, 4]] and found.scored == 5
        for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    finally:
        two.close()


@pytest.mark.parametrize(("sharding", "member"), [("none", "Member"), ("full", "ShardedMember")])
@pytest.mark.long(keep=1)
def test_process_that_fails_costs_its_worker_and_no_sample(
    sharding: str, member: str, corpus: Path, tmp_path: Path
) -> None:
    specs = ["worker.process:1=kill@5", "worker.process:0=error@14"]
    tables: dict[str, Any] = {"rounds": BATCH, "worker": {"processes": 2, "sharding": sharding, "lease_s": 3.0}}
    run = survive(f"process-{sharding}", corpus, tmp_path, specs, 2, **tables)
    reasons = {event["worker"]: event["reason"] for event in events(run, "loss")}
    assert reasons[1].startswith("a process of this worker has died")
    assert reasons[0] == "the inner loop broke: RuntimeError: a failpoint"
    assert psutil.wait_procs(processes_of(member), timeout=60)[1] == []


def test_processes_end_with_the_first_and_with_the_run(corpus: Path, tmp_path: Path) -> None:
    found: list[set[int]] = []

    def strike(record: dict[str, Any]) -> None:
        if record["kind"] == "round" and record["round"] == 0:
            found.append(processes_of("Member"))
            first = ray.get_actor("worker-1", namespace="struck")
            os.kill(ray.get(first.pid.remote()), signal.SIGKILL)

    rounds = BATCH | {"update_rounds": 6}
    job = job_of("struck", corpus, rounds=rounds, worker={"processes": 2, "lease_s": 3.0})
    run = run_job(job, tmp_path, corpus, seen=strike)
    assert [event["worker"] for event in events(run, "loss")] == [1]
    assert set(run.used().values()) == {1} and len(run.commits()) == 6
    assert len(found[0]) == 2 and psutil.wait_procs(found[0] | processes_of("Member"), timeout=60)[1] == []
