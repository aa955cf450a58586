"""Comparison of a simulated run with models of other ways to train under the same failures, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hypha_ray.simulation.result import SimulationResult
from hypha_ray.simulation.rivals.failure_trace import failure_trace
from hypha_ray.simulation.rivals.models import MachineFailure, RivalCosts, mean_time_between, rivals_goodput
from hypha_ray.simulation.scenario import Scenario
from hypha_ray.telemetry.sinks.table import duration

OURS = "hypha_ray, simulated"
RESTARTS_S = (30.0, 60.0, 180.0, 600.0)
"""Times of a restart for which the models are shown."""
ASSUMPTIONS = (
    "all: equal machines; no failure takes time to notice; gradients are exchanged in no time",
    "DDP: a failure stops all; checkpoints at Young's (CACM 17(9), 1974) and Daly's (FGCS 22(3), 2006) interval",
    "Ray Train 2.60 with a range of workers: the group restarts with what is there, and again for machines that return",
    "torchft: a failure costs half a step and a pause of 5 s, its heartbeat's timeout; a return costs the same pause",
    "a restart of 3 min is the short end of 3 to 10 min in arXiv 2602.00277 (abstract); --restart-s sets it",
)


@dataclass(frozen=True, slots=True)
class RivalComparison:
    """A simulated run, and the failures that it has met."""

    scenario: Scenario
    result: SimulationResult
    costs: RivalCosts
    failures: tuple[MachineFailure, ...]

    def rivals(self, restart_s: float) -> dict[str, float]:
        """Goodput of each model, by its name, with another time of a restart."""
        costs = replace(self.costs, restart_s=restart_s)
        return rivals_goodput(self.failures, self.scenario.machine_count, self.result.time_s, costs)

    def as_json(self) -> dict[str, Any]:
        """The run's figures, with the models' goodput and the times that they take as given."""
        return {
            **self.result.as_json(),
            "failures": len(self.failures),
            "rivals": self.rivals(self.costs.restart_s),
            "rival_costs": asdict(self.costs),
        }


def compare(scenario: Scenario, result: SimulationResult, costs: RivalCosts) -> RivalComparison:
    """Compare a scenario's run with the models, under the failures up to its last commit."""
    return RivalComparison(scenario, result, costs, tuple(failure_trace(scenario, result.time_s)))


def comparison_lines(comparison: RivalComparison) -> Iterator[str]:
    """Lines of a table of goodput by the time of a restart, and of what the models assume."""
    costs = comparison.costs
    horizon_s = comparison.result.time_s
    mean_s = mean_time_between(comparison.failures, horizon_s)
    machines = comparison.scenario.machine_count
    failures = len(comparison.failures)
    yield f"{machines} machines, failures in {duration(horizon_s)}: {failures}, one in {duration(mean_s)}"
    restarts_s = sorted({*RESTARTS_S, costs.restart_s})
    columns = {restart_s: comparison.rivals(restart_s) for restart_s in restarts_s}
    heads = "".join(f"{duration(restart_s):>9}" for restart_s in restarts_s)
    yield f"{'goodput, by the time of a restart':<38}{heads}"
    ours = f"{comparison.result.goodput:>9.3f}" * len(restarts_s)
    yield f"{OURS:<38}{ours}"
    for name in columns[costs.restart_s]:
        cells = "".join(f"{column[name]:>9.3f}" for column in columns.values())
        yield f"{name:<38}{cells}"
    yield f"models write a checkpoint in {costs.checkpoint_s:g} s and load it in {costs.reload_s:g} s"
    for assumption in ASSUMPTIONS:
        yield f"assumed of {assumption}"
