"""Sizes of batches that fit into a lease: found by trials in processes of their own, kept, and never guessed."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypha_ray.batch_size import NO_MEMORY, TOO_LARGE, Bounds, Trial, TrialOutcome, TrialProcesses, largest_batch
from hypha_ray.config import Job
from hypha_ray.config.schema import Model
from hypha_ray.errors import CapacityError, ConfigError
from hypha_ray.members.batch_trial import _out_of_memory_code
from hypha_ray.model.build import build_model
from hypha_ray.types import Samples
from hypha_ray.worker.incarnation import Closed
from tests.support.worker_bench import CONFIG

SAMPLES = Samples(
    {"input_ids": np.full((2, 16), 7), "attention_mask": np.ones((2, 16), np.int64)}, np.zeros((2, 3), int)
)
WEIGHTS_BYTES = 115e6
"""Size of the model's weights, nearly all of them in a table of tokens."""


def search(bounds: Bounds, most: int, threshold: int) -> tuple[Bounds, int]:
    """All trials where sizes up to the threshold fit."""
    trials = 0
    while (size := bounds.next_trial(most)) is not None:
        bounds = replace(bounds, fits=size) if size <= threshold else replace(bounds, fails=size)
        trials += 1
    return bounds, trials


@given(st.integers(1, 4096), st.integers(0, 5000))
def test_bounds_bisection_finds_the_largest_size_in_few_trials(most: int, threshold: int) -> None:
    found, trials = search(Bounds(), most, threshold)
    assert min(found.fits, most) == min(most, threshold)
    assert trials <= 1 + most.bit_length()


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 500))
def test_bounds_of_an_earlier_limit_are_used_for_another(first: int, second: int, threshold: int) -> None:
    known, _ = search(Bounds(), first, threshold)
    found, trials = search(known, second, threshold)
    assert min(found.fits, second) == min(second, threshold)
    assert trials == 0 or second > first or threshold < second


def job(memory_gb: float, most: int = 2, **model: Any) -> Job:
    tables = {"probe_batch_size": True, "prefetch_mb": 1, "device": "cpu"}
    return Job.model_validate(
        {
            "model": {"config": CONFIG | model},
            "rounds": {"max_batch_size": most},
            "worker": tables,
            "resources": {"worker": {"memory_gb": memory_gb}},
        }
    )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Contents of the files in which sizes are kept."""
    monkeypatch.setenv("HYPHA_RAY_HOME", str(tmp_path))
    return lambda: sorted(file.read_text() for file in (tmp_path / "batch_sizes").glob("*"))


def never() -> None:
    raise AssertionError("a trial runs")


@pytest.mark.slow
def test_largest_batch_that_fits_is_kept_for_the_next_start(kept: Callable[[], list[str]]) -> None:
    assert largest_batch(job(64.0), 0, None, SAMPLES, lambda: None) == 2
    assert kept() == ['{"fits": 2, "fails": null}']
    assert largest_batch(job(64.0), 0, None, SAMPLES, never) == 2
    assert largest_batch(job(64.0, most=1), 0, None, SAMPLES, never) == 1


@pytest.mark.slow
@pytest.mark.long
def test_largest_batch_is_found_where_nothing_can_be_kept(kept: Callable[[], list[str]], tmp_path: Path) -> None:
    (tmp_path / "batch_sizes").write_text("no folder")
    assert largest_batch(job(64.0), 0, None, SAMPLES, lambda: None) == 2
    assert kept() == []


@pytest.mark.slow
def test_largest_batch_without_room_for_one_sample_is_an_error_and_trials_alone_end(
    kept: Callable[[], list[str]],
) -> None:
    named = r"TRN003.*one sample doesn't fit.*0\.05 GB on cpu.*delete \S+/batch_sizes/\w+\.json"
    with pytest.raises(ConfigError, match=named):
        largest_batch(job(0.05), 0, None, SAMPLES, lambda: None)
    assert kept() == ['{"fits": 0, "fails": 1}']


@pytest.mark.slow
@pytest.mark.long
def test_largest_batch_of_a_model_that_fails_otherwise_is_no_size(kept: Callable[[], list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"TRN003.*a batch of 2 samples failed — got IndexError"):
        largest_batch(job(64.0, vocab_size=5), 0, None, SAMPLES, lambda: None)
    assert kept() == []


def test_largest_batch_of_a_worker_that_is_to_end_ends_its_trial(kept: Callable[[], list[str]]) -> None:
    def check() -> None:
        raise Closed

    with pytest.raises(Closed):
        largest_batch(job(64.0), 0, None, SAMPLES, check)
    assert kept() == []


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["trials", "all"])
@pytest.mark.long
def test_trials_that_something_else_kills_are_no_limit_of_the_model(
    whom: str, kept: Callable[[], list[str]], tmp_path: Path
) -> None:
    """They are killed as the kernel does it, when others have the memory."""

    def kill() -> None:
        for process in psutil.Process().children(recursive=whom == "trials"):
            with suppress(psutil.NoSuchProcess):  # It has ended meanwhile.
                is_trial = process.ppid() != os.getpid()
                if "hypha_ray.members.batch_trial" in process.cmdline() and is_trial == (whom == "trials"):
                    process.kill()

    with pytest.raises(CapacityError, match=r"TRN004.*other processes") as caught:
        largest_batch(job(64.0), 0, None, SAMPLES, kill)
    assert caught.value.exit_code == 75
    assert kept() == ['{"fits": 0, "fails": null}']
    assert largest_batch(job(64.0), 0, None, SAMPLES, lambda: None) == 2


def test_trial_that_ends_before_its_process_number_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, polls = tmp_path / "server", iter(range(100))
    server.write_text("#!/bin/sh\nprintf '1\\n0\\n'\nexec sleep 60\n")
    server.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(server))
    with TrialProcesses(None, lambda: print(next(polls))) as trials:
        assert trials.outcome(Trial(job(64.0), None, SAMPLES, 1, 0.0, 1.0, 1)) == TrialOutcome.FITS


def test_memory_of_a_gpu_runs_out_by_the_own_part_or_by_that_of_others() -> None:
    assert _out_of_memory_code(0.5, free_bytes=40, total_bytes=100, own_bytes=50) == TOO_LARGE
    assert _out_of_memory_code(0.5, free_bytes=1, total_bytes=100, own_bytes=20) == NO_MEMORY


@pytest.mark.slow
@pytest.mark.long
def test_bounds_of_a_model_are_not_those_of_another_one_in_its_folder(
    kept: Callable[[], list[str]], tmp_path: Path
) -> None:
    folder, sizes = tmp_path / "model", list[int]()
    for layers in (1, 2, 1):
        build_model(Model(config=CONFIG | {"n_layer": layers}), 0).save_pretrained(folder)
        tables = {"model": {"repository": str(folder), "config": None}}
        own = job(64.0, most=1).model_copy(update={"model": Model.model_validate(tables["model"])})
        assert largest_batch(own, 0, None, SAMPLES, lambda: None) == 1
        sizes.append(len(kept()))
    assert sizes == [1, 2, 2]


@pytest.mark.slow
@pytest.mark.long
def test_copies_of_the_weights_that_a_worker_keeps_count() -> None:
    """The trial takes four times the weights, building the model included; three copies are kept besides."""
    model = {**CONFIG, "vocab_size": 50_000, "n_embd": 512, "n_positions": 4}
    optimizer = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "clip_norm": None}
    job = Job.model_validate({"model": {"config": model}, "inner_optimizer": optimizer, "worker": {"device": "cpu"}})
    ids = np.full((1, 4), 7)
    samples = Samples({"input_ids": ids, "attention_mask": np.ones_like(ids)}, np.zeros((1, 3), int))
    trials = [Trial(job, None, samples, 1, copies * WEIGHTS_BYTES, 1.0, 1) for copies in (5.5, 9.0)]
    command = [sys.executable, "-m", "hypha_ray.members.batch_trial"]
    told = b"".join(map(pickle.dumps, trials))
    lines = subprocess.run(command, input=told, stdout=subprocess.PIPE, check=True).stdout.splitlines()
    assert [int(line) for line in lines[1::2]] == [TOO_LARGE, 0]
    assert len({int(line) for line in lines[::2]}) == 2, "each has a process of its own"
