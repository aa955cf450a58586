"""Simulate a training on many machines: times, bytes, utilisation and cost, from a scenario; nothing is trained.

    python jobs/simulate.py --scenario laptop
    python jobs/simulate.py --scenario home-1000 --workers 100 --rounds 5 --json results.json
    python jobs/simulate.py --scenario scenario.toml --seed 7 --plot plots
    python jobs/simulate.py --from RUN --try sync.codec=int4 --try sync.fragments=4,sync.delay_steps=4 --deadline 6h
    python jobs/simulate.py --advise @ jobs/configs/tiny.toml --link 20mbit --latency 20ms
    python jobs/simulate.py --rivals --workers 50 --rounds 5
    python jobs/simulate.py --scenario deadline --days 200

The scheduler's own code runs on a virtual clock. The scenarios of the package are laptop, rack, three-regions,
home-1000, failing-1000, spot-10000, deadline, intellect-1 and streaming-10b. docs/simulation.md has the keys of a file
of your own.

With --advise it proposes settings for a job and its links, as TOML that goes behind the job file; docs/choosing.md. All
of its options: python jobs/simulate.py --advise --help
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypha_ray.config.entry_point import Phases, require_writable, run
from hypha_ray.config.options import REPEATED, make_plot_folder, parse_options, refuse_strays
from hypha_ray.errors import ConfigError
from hypha_ray.texts import counted

if TYPE_CHECKING:
    from hypha_ray.simulation.result import SimulationResult
    from hypha_ray.simulation.scenario import Scenario


FAILING = "failing-1000"
"""Scenario of --rivals without another."""
RIVAL_COSTS = ("restart_s", "reload_s", "checkpoint_s")
OF_RIVALS = dict.fromkeys(RIVAL_COSTS, ("rivals",))
"""Options that mean something beside --rivals alone."""
OF_A_RUN = dict.fromkeys(("try_", "deadline", "budget"), ("from_",))
"""Options that mean something beside --from alone."""
BESIDE_DAYS = ("plot", "rivals")
"""Options that mean nothing beside --days."""
OF_A_SCENARIO = ("scenario", "workers", "rounds", "seed", "days", "plot", "rivals")
"""Options that mean nothing beside --from."""


@dataclass(frozen=True)
class Simulate:
    """Simulate a training."""

    scenario: str | None = None
    """name of a scenario of the package, or a TOML file"""
    workers: int | None = None
    """number of machines, in the proportions of the scenario's groups"""
    rounds: int | None = None
    """number of rounds, as job.rounds.update_rounds"""
    seed: int | None = None
    """seed of speeds, times and failures"""
    days: int | None = None
    """number of runs with consecutive seeds, for a job with goal.by; how many are late, and what they cost"""
    advise: bool = False
    """propose settings for a job file and its links instead; --advise --help lists the options"""
    json: Path | None = None
    """file for the results, as a JSON list; -: standard output"""
    plot: Path | None = None
    """folder for plots"""
    from_: str | None = None
    """name of a run, or its directory: predicted from its own records, beside what took place"""
    try_: list[str] | None = field(default=None, metadata=REPEATED)
    """other settings for that run, as KEY=VALUE[,KEY=VALUE…], for each --try a row"""
    deadline: str | None = None
    """longest time for that run, such as 6h, 90min or 2d"""
    budget: float | None = None
    """highest cost for that run"""
    rivals: bool = False
    """compare the goodput with models of DDP, Ray Train and torchft, for minutes; default scenario: failing-1000"""
    restart_s: float | None = None
    """seconds of a restart in those models; default: 180"""
    reload_s: float | None = None
    """seconds in which they load a checkpoint; default: 30"""
    checkpoint_s: float | None = None
    """seconds in which they write a checkpoint; default: 10"""


def main() -> None:
    """Simulate, and print a table of the results."""
    if any(word.partition("=")[0] == "--advise" for word in sys.argv[1:]):
        from hypha_ray.driver.what_if import advise

        advise(sys.argv[1:], __doc__)
        return
    options = parse_options(Simulate, __doc__, sys.argv[1:], position="scenario")
    check(options)
    if options.from_ is not None:
        predict(options)
        return
    phases = Phases()
    phases.begin("reading the scenario")
    scenarios = scenarios_of(options)
    if options.days is not None:
        show_days(scenarios, options, phases)
        return
    results = simulate_scenarios(scenarios, phases)
    phases.end()
    if options.rivals:
        show_rivals(scenarios, results, options)
    else:
        show(results, options)


def check(options: Simulate) -> None:
    """Refuse options that are missing or out of range.

    Raises:
        ConfigError: CFG003, a number is out of range; CFG008 and CFG015, a file or folder can't be written; CFG011,
            options exclude each other; CFG012, there is nothing to simulate.

    """
    refuse_strays(options, OF_A_RUN | OF_RIVALS)
    require_writable("--json", options.json)
    for name in RIVAL_COSTS:
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            option = "--" + name.replace("_", "-")
            raise ConfigError(
                "CFG003", f"{option} is out of range", str(value), "seconds above 0", "write such a number"
            )
    for name, least in (("workers", 1), ("rounds", 1), ("seed", 0), ("days", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(
                "CFG003", f"--{name} is out of range", str(value), f"{least} or more", "write such a number"
            )
    if options.days is not None:
        refuse_beside(options, "--days", BESIDE_DAYS, "leave one out")
    if options.from_ is not None:
        fix = "leave one out; --try KEY=VALUE changes a run's settings"
        refuse_beside(options, "--from", OF_A_SCENARIO, fix)
        return
    if options.scenario is None and not options.rivals:
        raise ConfigError(
            "CFG012", "--scenario is missing", fix="give the name of a scenario or a TOML file, or --from RUN"
        )
    if options.plot is not None:
        make_plot_folder("--plot", options.plot)


def refuse_beside(options: Simulate, option: str, names: Sequence[str], fix: str) -> None:
    """Refuse options that mean nothing beside another one.

    Raises:
        ConfigError: CFG011, one of them is given.

    """
    for name in names:
        if getattr(options, name) not in (None, False):
            raise ConfigError("CFG011", f"{option} and --{name} exclude each other", fix=fix)


def predict(options: Simulate) -> None:
    """Print predictions of a run from its records, with its own settings and with others."""
    assert options.from_ is not None, "see main"
    from hypha_ray.driver.what_if import answers

    lines = answers(options.from_, options.try_ or [], options.deadline, options.budget, options.json)
    for line in lines:
        print(line)


def scenarios_of(options: Simulate) -> list[Scenario]:
    """Read a scenario, or all points of its sweep.

    Raises:
        ConfigError: with the file, line and key to correct.

    """
    from hypha_ray.simulation.scenario_file import read_scenarios

    overrides = {}
    for name in ("workers", "rounds", "seed"):
        value = getattr(options, name)
        if value is not None:
            overrides[name] = value
    return read_scenarios(options.scenario or FAILING, overrides)


def simulate_scenarios(scenarios: list[Scenario], phases: Phases) -> list[SimulationResult]:
    """Simulate each scenario."""
    from hypha_ray.simulation.result import simulate

    results: list[SimulationResult] = []
    for number, scenario in enumerate(scenarios, 1):
        text = f"simulating {counted(scenario.workers, 'worker')}, run {number} of {len(scenarios)}"
        phases.begin(text)
        results.append(simulate(scenario, partial(say_round, phases, text)))
    return results


def say_round(phases: Phases, text: str, record: Mapping[str, Any]) -> None:
    """Say how far a simulation is, after a silence."""
    phases.update(f"{text}, round {record['round'] + 1} of {record['rounds']}")


def show(results: list[SimulationResult], options: Simulate) -> None:
    """Print a table of the results; write them, and draw them, if that is asked for."""
    from hypha_ray.simulation.result import HEADLINE, table, write_rows

    print(HEADLINE)
    for line in table(results):
        print(line)
    simulated_s = sum(result.time_s for result in results)
    print(f"simulated {simulated_s:.0f} s in {time.process_time():.1f} s of this machine")
    if options.json is not None:
        write_rows([result.as_json() for result in results], options.json)
    draw(results, options)


def show_days(scenarios: list[Scenario], options: Simulate, phases: Phases) -> None:
    """Simulate days of each scenario; print how many deadlines were missed, and the cost; write them if asked for."""
    from hypha_ray.simulation.goal_days import day_of, efficiency_of, firm_scenario, lines_of_days, scenarios_of_days
    from hypha_ray.simulation.result import HEADLINE, write_rows

    rows = []
    for scenario in scenarios:
        of_days = scenarios_of_days(scenario, options.days or 1)
        on_demand = firm_scenario(scenario)
        first, *results = simulate_scenarios([on_demand, *of_days], phases)
        efficiency = efficiency_of(on_demand, first)
        days = [day_of(day, result, efficiency) for day, result in zip(of_days, results, strict=True)]
        rows += [day.as_json() for day in days]
        phases.end()
        print(HEADLINE)
        for line in lines_of_days(days):
            print(line)
    if options.json is not None:
        write_rows(rows, options.json)


def draw(results: list[SimulationResult], options: Simulate) -> None:
    """Draw the results if that is asked for."""
    if options.plot is not None:
        from hypha_ray.simulation.result import draw_results

        for path in draw_results(results, options.plot):
            print(path)


def show_rivals(scenarios: list[Scenario], results: list[SimulationResult], options: Simulate) -> None:
    """Print the goodput of each run beside that of models under the same failures; write them if that is asked for."""
    from hypha_ray.simulation.result import HEADLINE, write_rows
    from hypha_ray.simulation.rivals import RivalCosts, compare, comparison_lines

    given = {name: getattr(options, name) for name in RIVAL_COSTS if getattr(options, name) is not None}
    costs = RivalCosts(**given)
    print(HEADLINE)
    comparisons = []
    for scenario, result in zip(scenarios, results, strict=True):
        comparison = compare(scenario, result, costs)
        comparisons.append(comparison)
        for line in comparison_lines(comparison):
            print(line)
    if options.json is not None:
        write_rows([comparison.as_json() for comparison in comparisons], options.json)
    draw(results, options)


if __name__ == "__main__":
    run(main)
