"""Days of a job with a goal: deadlines, costs, and the least cost, worked out by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hypha_ray.errors import ConfigError
from hypha_ray.scheduler.messages import ResumePoint
from hypha_ray.simulation import fleet_world
from hypha_ray.simulation.goal_days import (
    Day,
    day_of,
    efficiency_of,
    firm_scenario,
    least_cost,
    lines_of_days,
    scenarios_of_days,
)
from hypha_ray.simulation.result import simulate
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.simulation.scenario_file import read_scenarios

TEXT = """
name = "two hours"

[job.goal]
by = "{by}"
{at_most}

[job.rounds]
update_rounds = 12
samples_between_updates = 600
max_batch_size = 10

[job.resources]
num_workers = 2

[job.worker]
report_every_s = 60
lease_s = 200

[model]
parameters = 1000

[[machines]]
count = 2
batch_s = {{ median = 10 }}
price = 0.25
available = "spot.csv"

[[machines]]
count = 2
batch_s = {{ median = 10 }}
price = 1.0
"""
TRACE = "at_s,machine,event\n1800,0,leave\n1800,1,leave\n3600,0,join\n"
"""Two spot machines for half an hour, and one of them again from the second hour on."""


def scenario(folder: Path, by: str = "5400", at_most: str = "") -> Scenario:
    (folder / "spot.csv").write_text(TRACE)
    file = folder / "scenario.toml"
    file.write_text(TEXT.format(by=by, at_most=at_most))
    (only,) = read_scenarios(str(file))
    return only


def test_least_cost_takes_spot_machines_first(tmp_path: Path) -> None:
    """7 200 samples at one a second: 3 600 + 1 800 s of spot machines, and 1 800 s on demand."""
    assert least_cost(scenario(tmp_path), 5400.0) == pytest.approx(1.5 * 0.25 + 0.5 * 1.0)


def test_least_cost_of_too_little_time_is_infinite(tmp_path: Path) -> None:
    assert least_cost(scenario(tmp_path), 3000.0) == float("inf")


def test_run_with_a_goal_keeps_its_deadline_near_the_least_cost(tmp_path: Path) -> None:
    day = scenario(tmp_path)
    result = simulate(day)
    judged = day_of(day, result, efficiency=1.0)
    assert not judged.is_missed
    assert judged.least_cost <= judged.cost < 2 * judged.least_cost
    on_demand_alone = 2.0
    assert judged.cost < on_demand_alone


def test_deadline_of_a_resumed_run_counts_from_its_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began 20 minutes ago has so much less time to wait for spot machines."""
    day = scenario(tmp_path)
    fresh = simulate(day)
    monkeypatch.setattr(fleet_world, "ResumePoint", partial(ResumePoint, since_start_s=1200.0))
    resumed = simulate(day)
    assert 1200 + resumed.time_s <= 5400 < 1200 + fresh.time_s
    assert resumed.cost > fresh.cost


def test_waits_are_measured_on_machines_that_all_work_all_the_time(tmp_path: Path) -> None:
    """Four machines without links or starts waste nothing, whichever of them a goal would hire."""
    text = TEXT.format(by="1d", at_most="").replace('available = "spot.csv"', "")
    file = tmp_path / "scenario.toml"
    file.write_text(text.replace("batch_s = { median = 10 }\nprice = 0.25", "batch_s = { median = 40 }\nprice = 0.25"))
    (day,) = read_scenarios(str(file))
    slow_and_cheap = firm_scenario(day)
    assert efficiency_of(slow_and_cheap, simulate(slow_and_cheap)) == pytest.approx(1.0, abs=0.02)
    dear = day.model_copy(update={"machines": day.machines[::-1]})
    assert efficiency_of(firm_scenario(dear), simulate(firm_scenario(dear))) == pytest.approx(1.0, abs=0.02)


def test_days_of_machines_without_a_price_have_no_ratio() -> None:
    day = Day(0, 80_000.0, 0.0, 0.0, 0.0, is_missed=False)
    assert lines_of_days([day])[1] == "mean cost: 0.00; least cost that knows each day's market: 0.00"


def test_run_ends_at_the_last_round_that_its_budget_pays(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, by="2d", at_most="at_most = 0.3"))
    assert 0 < result.rounds < 12
    assert result.cost <= 0.3
    assert result.failure is None
    assert result.events["stop"] == 1


def test_late_run_says_so(tmp_path: Path) -> None:
    result = simulate(scenario(tmp_path, by="3000"))
    assert result.events["problem"] >= 1
    assert result.time_s > 3000


def test_days_need_a_deadline() -> None:
    with pytest.raises(ConfigError, match=r"job\.goal\.by"):
        scenarios_of_days(read_scenarios("laptop")[0], 2)


@pytest.mark.slow
def test_days_of_the_scenario_miss_no_deadline() -> None:
    (day,) = scenarios_of_days(read_scenarios("deadline")[0], 1)
    assert not day_of(day, simulate(day), 1.0).is_missed


def test_days_whose_deadline_no_policy_keeps_have_no_bound_and_no_ratio() -> None:
    day = Day(7, 90_000.0, 12.0, float("inf"), float("inf"), is_missed=True)
    assert day.as_json()["least_cost"] is None and day.as_json()["bare_cost"] is None
    lines = lines_of_days([day, Day(8, 80_000.0, 14.0, 10.0, 9.0, is_missed=False)])
    assert lines[0] == "days: 2; deadlines missed: 1, of seeds 7"
    absent = "none, since no policy can keep all deadlines"
    assert lines[1].endswith(f"each day's market: {absent}") and lines[2].endswith(f"would be: {absent}")
