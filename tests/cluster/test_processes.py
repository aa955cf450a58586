"""Workers of several processes: the rounds of one process, and whatever dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import Outcome, job_of, run_job
from tests.support.plain import final_weights, furthest

pytestmark = pytest.mark.usefixtures("local_ray")
BATCH = {"samples_between_updates": 56, "max_batch_size": 7}
"""Rounds of four batches of each worker, which no number of processes divides."""


def outcome(name: str, corpus: Path, folder: Path, processes: int, **tables: Any) -> Outcome:
    tables = {"rounds": BATCH, "worker": {"processes": processes}, "run": {"name": name, "mode": "replay"}, **tables}
    return run_job(job_of(name, corpus, **tables), folder, corpus)


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
