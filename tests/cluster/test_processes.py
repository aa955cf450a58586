"""Workers of several processes: the rounds of one process, and whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hypha_ray.config import Job
from hypha_ray.types import Samples
from hypha_ray.worker.training.trainer import Trainer, trainer_of
from tests.support.jobs import Outcome, job_of, run_job
from tests.support.plain import final_weights, furthest
from tests.support.truth_cases import Case
from tests.support.truth_samples import BERT, LLAMA, classes, text

pytestmark = pytest.mark.usefixtures("local_ray")
BATCH = {"samples_between_updates": 56, "max_batch_size": 7}
"""Rounds of four batches of each worker, which no number of processes divides."""


def outcome(name: str, corpus: Path, folder: Path, processes: int, **tables: Any) -> Outcome:
    tables = {"rounds": BATCH, "worker": {"processes": processes}, "run": {"name": name, "mode": "replay"}, **tables}
    return run_job(job_of(name, corpus, **tables), folder, corpus)


def members() -> set[psutil.Process]:
    """Processes of this test that are part of a worker without being its first."""
    everything = psutil.Process().children(recursive=True)
    return {one for one in everything if "ray::Member" in " ".join(one.cmdline())}


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
def test_two_processes_train_the_rounds_of_one(name: str, corpus: Path, tmp_path: Path) -> None:
    one, other = (outcome(f"{name}-{count}", corpus, tmp_path, count, **TABLES[name]) for count in (1, 2))
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
