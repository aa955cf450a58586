"""Rows of the benchmark of predictions, from recorded runs in the place of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.scheduling.prediction import ROWS, TRIALS, Outcome, rows_of

from hypha_ray.simulation.calibration import calibrate
from hypha_ray.simulation.options import parse_trial, parse_trials
from hypha_ray.simulation.predictions import predict
from hypha_ray.simulation.run_scenario import DataSize
from tests.support.recorded_run import write_run


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
    assert tuple(rows) == ROWS
    assert [rows[row]["value"] for row in ROWS] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert rows["prediction"]["shorter"] == "5.1%"


def test_predicted_runs_of_the_benchmark_have_settings_that_parse() -> None:
    for text in TRIALS.values():
        assert parse_trial(text).job
