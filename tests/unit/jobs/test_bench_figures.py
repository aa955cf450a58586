"""Figures that benchmarks make of a run's records."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import codecs, data_faults, device_exchange, exchange, sinks, slice_path, start
from benchmarks.convergence import asynchrony, exchange_options, quality
from benchmarks.gpu.rows import PARTS
from benchmarks.places import GPU, GPU_ROWS, PLACES, QUALITY, QUALITY_ROWS
from benchmarks.plots import draw
from benchmarks.rl import ahead, engines, steps
from benchmarks.scheduling import core, planner, prediction
from benchmarks.start import run_command
from benchmarks.wide_area import overlap
from benchmarks.wide_area.overlap import BATCH_S, WORKERS, exchange_s, utilisation
from benchmarks.wide_area.peak import most
from benchmarks.wide_area.time_to_loss import seconds_to

from hypha_ray.codec import NAMES
from hypha_ray.errors import ConfigError

ROOT = Path(__file__).parents[3]


def rounds(train_s: float, wait_s: float, count: int) -> list[dict[str, Any]]:
    batches = dict.fromkeys(range(WORKERS), round(train_s / BATCH_S))
    return [{"elapsed_s": 7.0 + n * (train_s + wait_s), "batches": batches} for n in range(count)]


def test_utilisation_is_the_part_of_a_round_in_which_workers_train() -> None:
    assert utilisation(rounds(6.0, 3.0, 5), BATCH_S) == pytest.approx(2 / 3)
    assert utilisation(rounds(6.0, 0.0, 5), BATCH_S) == pytest.approx(1)


def test_utilisation_counts_no_batch_of_the_round_that_it_begins_after() -> None:
    first, *rest = rounds(6.0, 3.0, 5)
    assert utilisation([{**first, "batches": {0: 1000}}, *rest], BATCH_S) == pytest.approx(2 / 3)


def test_worker_without_batches_is_a_worker_that_waits() -> None:
    half = [{**one, "batches": {0: one["batches"][0]}} for one in rounds(6.0, 0.0, 5)]
    assert utilisation(half, BATCH_S) == pytest.approx(1 / 2)


def test_exchange_is_as_long_as_the_heads_link_needs_for_all_bytes_both_ways() -> None:
    assert exchange_s(6_250_000) == pytest.approx(2 * WORKERS)  # A second each, at 50 Mbit/s.


def test_peak_is_the_most_in_a_second_between_two_times() -> None:
    moved = [0] * 100  # Bytes in each tenth of a second.
    moved[20:24], moved[50:58], moved[90:] = [50] * 4, [10] * 8, [1000] * 10
    counted = [(n / 10, sum(moved[:n])) for n in range(len(moved) + 1)]
    assert most(counted, 0.0, 9.0) == 200
    assert most(counted, 3.0, 9.0) == 80
    assert most(counted, 0.0, 10.1) == 10_000
    assert most(counted, 2.0, 2.5) == 0  # No window is so short.


def test_time_to_a_loss_lies_between_the_evaluations_around_it() -> None:
    curve = [(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]
    assert seconds_to(2.5, curve) == pytest.approx(15.0)
    assert seconds_to(2.0, curve) == pytest.approx(20.0)
    assert seconds_to(3.5, curve) == pytest.approx(10.0)
    assert seconds_to(0.5, curve) is None


def test_curve_that_rises_again_is_there_when_it_first_was() -> None:
    assert seconds_to(2.5, [(10.0, 3.0), (20.0, 2.0), (30.0, 2.8), (40.0, 1.0)]) == pytest.approx(15.0)


@pytest.mark.parametrize("name", exchange_options.OPTIONS)
def test_every_option_trains_on_equally_many_samples(name: str, tmp_path: Path) -> None:
    job = exchange_options.side(name).job(name, 0, tmp_path)
    samples = sum(job.samples(round) for round in range(job.rounds.update_rounds))
    assert samples == quality.WORKERS * quality.BATCH * exchange_options.STEPS


@pytest.mark.slow
def test_plots_are_drawn_of_the_rows_that_are_there(tmp_path: Path) -> None:
    rows: dict[str, dict[str, Any]] = {
        "quality": {"value": 1.01, "traffic": "1/101"},
        "sync_25M_2": {"value": 1.9},
        "sync_gloo_25M_2": {"value": 0.9},
        "asynchrony": {"value": 0.3},
        "asynchrony_loss": {"value": 0.9},
        "time_to_loss": {"loss": 2.2, "mbit_s": 50.0, "ours_curve": [[1, 5], [9, 2]], "ddp_curve": [[1, 5], [20, 2]]},
    }
    files = draw(rows, tmp_path)
    assert [file.name for file in files] == ["quality.svg", "exchange.svg", "time_to_loss.svg", "asynchrony.svg"]
    assert all(b"<svg" in file.read_bytes() for file in files)
    assert draw({"planner": {"value": 1.0}}, tmp_path / "none") == []


def test_exchange_between_a_device_and_its_host_is_checked_and_measured_for_each_codec() -> None:
    rows = device_exchange.device_exchange(torch.device("cpu"), millions=0.01, width=64, turns=1)

    assert tuple(rows) == device_exchange.ROWS
    assert rows["device_int8"]["crossed_bytes"] == 8192 + 4 * 8192 // 256
    assert rows["device_int8"]["weights_bytes"] == rows["device_merge"]["crossed_bytes"] == 4 * 8192
    with pytest.raises(RuntimeError, match="no GPU"):
        device_exchange.device_exchange()


def test_rows_of_sinks_that_are_not_installed_say_which_extras_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"CFG022.*mlflow, tensorboard.*pip install -e '\.\[mlflow,tensorboard\]'"):
        sinks.sinks()


@pytest.mark.slow
def test_command_of_a_row_that_fails_shows_its_last_line() -> None:
    command = [sys.executable, "jobs/configs.py", "nosuch"]
    with pytest.raises(RuntimeError, match=r"jobs/configs\.py ended with exit code 2: error\[CFG003\]"):
        run_command(command, os.environ)


def test_rows_that_are_offered_are_those_that_are_measured() -> None:
    peers = (f"sync{name}_{millions}M_{count}" for millions, count in exchange.SIZES for name in ("", "_gloo"))
    for place, rows in {
        "scheduling.planner:planner": planner.ROWS,
        "scheduling.core:core": core.ROWS,
        "scheduling.prediction:prediction": prediction.ROWS,
        "start:start": ("start", *start.ROWS),
        "sinks:sinks": sinks.ROWS,
        "rl.steps:rl": steps.ROWS,
        "rl.ahead:ahead": ahead.ROWS,
        "rl.engines:rounds": engines.ROUND,
        "rl.engines:long_responses": engines.LONG,
        "slice_path:slice_path": slice_path.ROWS,
        "data_faults:data_faults": data_faults.ROWS,
        "device_exchange:device_exchange": device_exchange.ROWS,
        "wide_area.overlap:overlap": tuple(row for row, *_ in overlap.ROWS),
        "convergence.asynchrony:asynchrony": asynchrony.ROWS,
        "convergence.exchange_options:options": exchange_options.ROWS,
        "codecs:codecs": (*(f"codec_{name}" for name in NAMES[1:]), codecs.DOWNWARD),
    }.items():
        assert sorted(PLACES[place]) == sorted(rows)
    assert set(peers) < set(PLACES["exchange:exchange"])
    assert tuple(quality.KINDS) == QUALITY_ROWS and tuple(PARTS) == GPU_ROWS


@pytest.mark.parametrize("place", [*PLACES, QUALITY, GPU])
def test_what_measures_rows_is_there(place: str) -> None:
    module, _, function = place.partition(":")
    assert callable(getattr(import_module(f"benchmarks.{module}"), function))


def test_unknown_row_is_refused_before_any_library_is_loaded(tmp_path: Path) -> None:
    for name in ("numpy", "ray", "torch", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('loaded')")
    command = [sys.executable, "jobs/bench.py", "--only", "quality", "plannr"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error[CFG001]: no row 'plannr'")
    assert ended.stderr.strip().endswith("Fix: write planner")
