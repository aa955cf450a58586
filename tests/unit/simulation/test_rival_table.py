"""A simulated run beside other ways to train: the same failures, and a table that says what it assumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hypha_ray.simulation.result import simulate, write_rows
from hypha_ray.simulation.rivals import RivalComparison, RivalCosts, compare, comparison_lines, failure_trace
from hypha_ray.simulation.scenario_file import read_scenarios


@pytest.fixture(scope="module")
def comparison() -> RivalComparison:
    (scenario,) = read_scenarios("failing-1000", {"workers": 40, "rounds": 4, "seed": 0})
    return compare(scenario, simulate(scenario), RivalCosts())


@pytest.mark.slow
def test_failures_of_the_models_are_those_of_the_run(comparison: RivalComparison) -> None:
    assert len(comparison.failures) == comparison.result.events["kill"] > 0
    assert all(failure.at_s < comparison.result.time_s and failure.down_s == 0 for failure in comparison.failures)


def test_preempted_machines_are_away_for_a_time_after_the_notice() -> None:
    (scenario,) = read_scenarios("spot-10000", {"workers": 100})
    failures = failure_trace(scenario, 3600.0)
    away = [failure for failure in failures if failure.down_s > 0]
    assert len(away) > 5 and failures == sorted(failures, key=lambda failure: (failure.at_s, failure.machine))
    assert all(failure.at_s + failure.down_s <= 3600.0 + 600.0 for failure in away)


@pytest.mark.slow
def test_table_has_a_row_of_each_model_and_the_assumptions(comparison: RivalComparison) -> None:
    lines = list(comparison_lines(comparison))
    assert lines[1].split()[-4:] == ["30.0s", "60.0s", "3m00s", "10m00s"]
    ddp = next(line for line in lines if line.startswith("DDP, checkpoints at Daly's"))
    cells = [float(cell) for cell in ddp.split()[-4:]]
    assert cells == sorted(cells, reverse=True)
    assert cells[2] == pytest.approx(comparison.rivals(180.0)["DDP, checkpoints at Daly's interval"], abs=5e-4)
    assert sum(line.startswith("assumed of ") for line in lines) == 5


def test_table_says_that_a_run_came_to_an_early_end() -> None:
    (scenario,) = read_scenarios("laptop", {"rounds": 2})
    result = replace(simulate(scenario), rounds=1, failure="there are too few workers")
    lines = list(comparison_lines(compare(scenario, result, RivalCosts())))
    assert "hypha_ray, simulated: ended after 1 round: there are too few workers" in lines


@pytest.mark.slow
def test_json_has_the_models_beside_the_run(comparison: RivalComparison, tmp_path: Path) -> None:
    write_rows([comparison.as_json()], tmp_path / "a.json")
    (row,) = json.loads((tmp_path / "a.json").read_text())
    assert row["goodput"] == comparison.result.as_json()["goodput"]
    assert row["rivals"] == comparison.rivals(180.0) and row["failures"] == len(comparison.failures)
    assert row["rival_costs"]["restart_s"] == 180.0
