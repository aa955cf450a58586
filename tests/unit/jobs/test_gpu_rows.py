"""Benchmarks of a GPU run on a CPU of tiny size, so that mistakes are found before a card is paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench import groups
from benchmarks.gpu import settings
from benchmarks.gpu.generation import generation
from benchmarks.gpu.loops import VALIDATION, plain, train
from benchmarks.gpu.rows import PARTS, is_there, measure_on
from benchmarks.gpu.size import TINY, texts
from benchmarks.gpu.trainer import trainer

from hypha_ray.config.automatic import OFF

SIZE = replace(TINY, warm=1, steps=3, turns=1)


def test_without_a_gpu_one_line_says_so_and_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    is_there.cache_clear()
    assert [measure_on("cuda", name) for name in PARTS] == [{}] * len(PARTS)
    assert capsys.readouterr().out.count("\n") == 1


def test_rows_are_named_and_the_name_gpu_stands_for_all() -> None:
    of_gpu = [names for names in groups("cpu") if "gpu" in names]
    assert all(names[0] == "gpu" for names in of_gpu)
    assert {name for _, name in of_gpu} == set(PARTS)


@pytest.mark.slow
def test_training_of_the_benchmark_is_that_of_a_worker_and_has_its_loss() -> None:
    """The same samples in the same order give the same loss, however they are computed."""
    ids = texts(SIZE, SIZE.steps + VALIDATION)
    found = {name: train(SIZE, SIZE.job(OFF | given), ids) for name, given in
             {"plain": {}, "fused": {"fused_loss": True}, "mixed": {"autocast": "bf16"}}.items()}  # fmt: skip
    assert found["fused"].loss == pytest.approx(found["plain"].loss, rel=1e-5)
    assert found["mixed"].loss == pytest.approx(found["plain"].loss, rel=1e-2)
    assert found["mixed"].loss != found["plain"].loss
    assert all(one.step_s > 0 and one.mfu is None and one.peak_gib is None for one in found.values())
    assert plain(SIZE, SIZE.job(OFF), ids) > 0


def test_settings_that_exclude_each_other_are_no_rows() -> None:
    tried = list(settings.combinations(replace(SIZE, device="cuda")))
    assert len(tried) == 2 * 2 * 4 and not any(one["compile"] and one["fused_loss"] for one in tried)


@pytest.mark.slow
def test_trainer_of_transformers_and_generation_are_measured() -> None:
    assert trainer(SIZE)["gpu_trainer"]["value"] > 0
    row = generation(SIZE)["gpu_generation"]
    assert row["value"] > 0 and row["prompts"] == 8
