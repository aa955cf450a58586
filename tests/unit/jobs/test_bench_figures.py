"""Figures of benchmarks: of a run's records, of starts and predictions, of tiny models, and beside simpler planners."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import groups, main
from benchmarks import codecs, data_faults, device_exchange, exchange, fitting, sinks, slice_path, start
from benchmarks.convergence import asynchrony, exchange_options, quality
from benchmarks.gpu import settings
from benchmarks.gpu.generation import generation
from benchmarks.gpu.loops import VALIDATION, Trained, plain, train
from benchmarks.gpu.rows import PARTS, is_there, measure_on
from benchmarks.gpu.size import TINY, Size, texts
from benchmarks.gpu.trainer import trainer
from benchmarks.places import GPU, GPU_ROWS, PLACES, QUALITY, QUALITY_ROWS
from benchmarks.plots import draw
from benchmarks.rl import ahead, engines, steps
from benchmarks.scheduling import core, planner, prediction
from benchmarks.scheduling.planner_rivals import FixedSteps, Projection, Start, clairvoyant
from benchmarks.scheduling.prediction import TRIALS, Outcome, rows_of
from benchmarks.scheduling.unsteady_fleet import MESSAGE_S, Conditions, Machine, UnsteadyFleet
from benchmarks.start import run_command
from benchmarks.wide_area import overlap
from benchmarks.wide_area.overlap import BATCH_S, WORKERS, exchange_s, utilisation
from benchmarks.wide_area.peak import most
from benchmarks.wide_area.time_to_loss import seconds_to
from torch._inductor.runtime.cache_dir_utils import cache_dir

from hypha_ray.codec import NAMES
from hypha_ray.config import Job
from hypha_ray.config.automatic import OFF, settings_of
from hypha_ray.errors import ConfigError
from hypha_ray.simulation.calibration import calibrate
from hypha_ray.simulation.options import parse_trial, parse_trials
from hypha_ray.simulation.predictions import predict
from hypha_ray.simulation.run_scenario import DataSize
from hypha_ray.worker import loop
from tests.support.recorded_run import write_run

ROOT = Path(__file__).parents[3]
LINES = [
    (13.0, "run: /runs/a\n"),
    (20.0, "done: 2 rounds\n"),
    (10.5, "[0.5s] loading libraries\n"),
    (22.5, "run: /runs/a\n"),
]
EVENTS = [
    {"kind": "join", "monotonic_s": 17.0},
    {"kind": "attempt", "monotonic_s": 12.0},
    {"kind": "join", "monotonic_s": 16.0},
]
SIZE = replace(TINY, warm=1, steps=3, turns=1)
DOCS = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8").splitlines()


WEIGHTS = 50_257 * 768 + 1024 * 768 + 2 * (12 * 768**2 + 13 * 768) + 2 * 768
"""Weights of GPT-2 with two of its layers: both tables, the layers, and the last norm."""


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


def test_start_is_timed_to_the_first_line_and_worker_and_the_end_from_done_to_the_last_line() -> None:
    assert start.times_of(10.0, LINES, EVENTS) == pytest.approx((0.5, 6.0, 2.5))


def test_rows_are_seconds_alone_and_ratios_beside_another_checkout() -> None:
    alone, ratios = start.rows([0.5, 6.0, 2.0], None), start.rows([0.5, 6.0, 2.0], [1.0, 12.0, 2.0])
    assert [alone[name]["value"] for name in start.ROWS] == [0.5, 6.0, 2.0]
    assert [ratios[name]["value"] for name in start.ROWS] == [0.5, 0.5, 1.0]
    assert ratios["start_first_worker"]["beside_s"] == 12.0


def test_rows_of_outcomes_have_the_median_error_of_each_figure(tmp_path: Path) -> None:
    base = write_run(tmp_path / "base")
    trials = parse_trials(["rounds.samples_between_updates=60", "rounds.evaluate_every=1", "sync.codec=int8"])
    shorter, same, coded = predict(calibrate(base), base, trials, lambda job: DataSize()).trials
    short_run = calibrate(write_run(tmp_path / "short", batches=(10, 5)))
    base_run = calibrate(base)
    outcomes = {
        "shorter": Outcome(shorter, short_run),
        "same": Outcome(same, base_run),
        "coded": Outcome(coded, base_run),
    }
    # Four rounds of 1.45 s, three evaluations before rounds and one after the last, and its merge. The first simulated
    # round knows no speeds: its 7 batches of 0.2 s take 0.4 s longer.
    recorded_s = 4 * 1.45 + 4 * 0.5 + 0.1
    assert outcomes["shorter"].error("time_s") == pytest.approx(0.4 / recorded_s)
    # The record of 4000 bytes is that of fp32; int8 has 260 bytes for each 256 parameters.
    assert outcomes["coded"].error("bytes_up") == pytest.approx(1 - 1040 / 4000)
    rows = rows_of(outcomes)
    assert tuple(rows) == prediction.ROWS
    assert [rows[row]["value"] for row in prediction.ROWS] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert rows["prediction"]["shorter"] == "5.1%"


def test_predicted_runs_of_the_benchmark_have_settings_that_parse() -> None:
    for text in TRIALS.values():
        assert parse_trial(text).job


def test_without_a_gpu_one_line_says_so_and_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    is_there.cache_clear()
    assert [measure_on("cuda", name) for name in PARTS] == [{}] * len(PARTS)
    assert capsys.readouterr().out.count("\n") == 1
    is_there.cache_clear()
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "gpu", "--json", "rows.json"])
    monkeypatch.chdir(tmp_path)
    main()
    printed = capsys.readouterr()
    assert (printed.out.count("\n"), printed.err) == (1, "")
    assert (tmp_path / "rows.json").read_text() == "{}\n"


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


@pytest.mark.slow
def test_peak_of_the_benchmark_is_the_highest_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker counts anew with each round that it hands over."""
    peaks = iter([3 << 30, 2 << 30])
    monkeypatch.setattr(loop, "take_peak_memory", lambda device: next(peaks))
    assert train(SIZE, SIZE.job(OFF), texts(SIZE, SIZE.steps + VALIDATION)).peak_gib == 3


def test_seconds_of_the_first_steps_are_without_code_that_was_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen has the code of one of the settings."""
    folders: list[str] = []

    def trained(size: Size, job: Job, ids: Any) -> Trained:
        folders.append(cache_dir())
        return Trained(settings_of(job), step_s=1.0, first_s=1.0, peak_gib=None, loss=1.0, mfu=None)

    monkeypatch.setattr(settings, "train", trained)
    before = cache_dir()
    assert settings.automatic(SIZE)["gpu_auto"]["value"] == 1
    assert before not in folders and folders.index(folders[-1]) == len(folders) - 1 > 1


def test_settings_that_exclude_each_other_are_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "can_compile", lambda: True)
    tried = list(settings.combinations(replace(SIZE, device="cuda")))
    assert len(tried) == 2 * 2 * 4 and not any(one["compile"] and one["fused_loss"] for one in tried)


def test_compiled_models_are_no_rows_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "can_compile", lambda: False)
    tried = list(settings.combinations(replace(SIZE, device="cuda")))
    assert len(tried) == 2 * 2 * 2 and not any(one["compile"] for one in tried)


@pytest.mark.slow
def test_trainer_of_transformers_and_generation_are_measured() -> None:
    assert trainer(SIZE)["gpu_trainer"]["value"] > 0
    row = generation(SIZE)["gpu_generation"]
    assert row["value"] > 0 and row["prompts"] == 8


class Steady(Machine):
    """A machine whose batches all take the same time."""

    def __init__(self, batch_s: float) -> None:
        self._batch_s = batch_s

    def seconds(self, batch: int, at: float) -> float:
        """Time of any batch."""
        return self._batch_s


def start_of(*batch_s: float, target: int) -> Start:
    """A round's start with steady machines."""
    return Start([Steady(seconds) for seconds in batch_s], 5.0, (0,) * len(batch_s), target)


def test_clairvoyant_takes_batches_in_the_order_of_their_ends() -> None:
    assert clairvoyant(start_of(1.0, 3.0, target=4)) == pytest.approx(3.0 + 2 * MESSAGE_S)
    assert clairvoyant(start_of(1.0, 3.0, target=5)) == pytest.approx(4.0 + 2 * MESSAGE_S)


def test_fixed_steps_wait_for_the_slowest() -> None:
    assert FixedSteps()(start_of(1.0, 3.0, target=4)) == pytest.approx(6.0 + 2 * MESSAGE_S)


def test_projection_of_steady_machines_is_as_good_as_clairvoyance() -> None:
    rule = Projection()
    start = start_of(1.0, 3.0, target=8)
    rule(start)
    assert rule(start) == pytest.approx(clairvoyant(start))


@pytest.mark.parametrize("conditions", [Conditions(), Conditions(noise=0.3, drift=0.2, stragglers=0.05)])
def test_no_round_of_the_scheduler_is_shorter_than_the_clairvoyants(conditions: Conditions) -> None:
    machines = [Machine(3, number, conditions) for number in range(4)]
    fleet = UnsteadyFleet(machines, batches=10, rounds=4).run()
    assert len(fleet.finished_rounds) == 4
    for timing in fleet.finished_rounds:
        start = Start(machines, timing.began_at + MESSAGE_S, timing.done, 40)
        assert timing.ended_at - timing.began_at >= clairvoyant(start) - 1e-9


def test_scheduler_is_within_a_hundredth_of_the_clairvoyant_with_exact_times() -> None:
    machines = [Machine(5, number, Conditions()) for number in range(8)]
    fleet = UnsteadyFleet(machines, batches=20, rounds=4).run()
    for timing in fleet.finished_rounds[2:]:
        start = Start(machines, timing.began_at + MESSAGE_S, timing.done, 160)
        assert timing.ended_at - timing.began_at <= 1.01 * clairvoyant(start)


@pytest.mark.slow
def test_table_of_the_docs_has_the_models_of_the_command_and_the_first_of_them_is_computed_alike() -> None:
    """Its fastest settings fit into every GPU, so the others need not be computed."""
    first = DOCS.index(next(fitting.table()))
    rows = DOCS[first + 2 : first + 2 + len(fitting.SIZES)]
    smallest = fitting.SIZES[0]
    assert [row.split(" | ")[0] for row in rows] == [f"| {size.name}" for size in fitting.SIZES]
    fastest = next(iter(fitting.SETTINGS))
    needed = {fastest: fitting.needed_bytes(smallest.config, fitting.SETTINGS[fastest])}
    assert rows[0] == fitting.row(smallest, needed) == f"| {' | '.join([smallest.name, *[fastest] * 4])} |"


@pytest.mark.slow
def test_needed_memory_grows_with_what_is_trained_and_shrinks_by_checkpointing() -> None:
    shallow = fitting.SIZES[0]._replace(config={**fitting.SIZES[0].config, "n_layer": 2})
    needed = fitting.needs_of(shallow)
    whole, again, narrow, _, adapter, lean, half, least = (needed[name] or 0 for name in fitting.SETTINGS)
    assert whole > again > lean > WEIGHTS * 4 and least > WEIGHTS * 2
    assert whole > narrow and whole > adapter > lean and adapter > half > least
